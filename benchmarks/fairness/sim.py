"""Runs policies in cells: a closed crowd for a number of steps, or one finite trace to its end."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable

from benchmarks.fairness.baselines import Fcfs
from benchmarks.fairness.crowd import Cell, Crowd
from benchmarks.fairness.meter import Measured, Meter
from benchmarks.fairness.policy import COPY_S, COPY_SLOWDOWN, SWAP_IN_STEP_S, Job, Policy, Shape
from benchmarks.fairness.turns import Turns, limits_of
from engine_svc.core.limits import longest_turn, quantum_floor
from engine_svc.types import EngineLimits

#: all three copy adapters beside the steps: nothing but whom a step serves is compared
TURNS, SKIP, SLICE = "loraplex", "FCFS, skips", "FCFS, 2 s slices"
POLICIES = (TURNS, SKIP, SLICE)
#: the baselines as the field has them: an adapter is brought in inside the step
FIELD_SKIP, FIELD_SLICE = "FCFS, skips, swaps in steps", "FCFS, 2 s slices, swaps in steps"
#: what the cap costs whoever schedules: no cap at all; and with the cap each adapter drained once,
#: those with the most work first, copies free
NO_CAP, CAP_ALONE = "no cap", "the cap alone"
TRACES = (*POLICIES, FIELD_SKIP, FIELD_SLICE, NO_CAP, CAP_ALONE)
SLICE_S = 2.0
#: with few places the quantum ends turns, with 32 and more the steps do: 300 turns a place and 20
#: rounds leave 16 steps a turn
TURN_MAX_STEPS = 14
#: the least that keeps what one step and a soft close overdraw below a turn
STEPS_A_QUANTUM = 2
#: a policy that has not finished the trace after so many steps fails the benchmark
TRACE_STEPS_LIMIT = 10**7


def shape_of(cell: Cell) -> Shape:
    """Two sequences an adapter; a full batch leaves two thirds of a step's tokens to prompts, so
    that seats bind, not tokens."""
    seats = max(16, 2 * cell.max_loras)
    return Shape(cell.max_loras, seats, 3 * seats)


def engine_limits(cell: Cell) -> EngineLimits:
    """Short turns: many rounds in few steps."""
    limits = limits_of(shape_of(cell), quantum=0, turn_max_steps=TURN_MAX_STEPS)
    return dataclasses.replace(limits, quantum=STEPS_A_QUANTUM * quantum_floor(limits))


def policy_of(name: str, cell: Cell) -> Policy:
    shape, own_copy_s = shape_of(cell), COPY_S * COPY_SLOWDOWN
    uncapped = dataclasses.replace(shape, max_loras=shape.max_num_seqs)
    makers: dict[str, Callable[[], Policy]] = {
        TURNS: lambda: Turns(engine_limits(cell)),
        SKIP: lambda: Fcfs(shape, own_copy_s),
        SLICE: lambda: Fcfs(shape, own_copy_s, SLICE_S),
        FIELD_SKIP: lambda: Fcfs(shape, SWAP_IN_STEP_S),
        FIELD_SLICE: lambda: Fcfs(shape, SWAP_IN_STEP_S, SLICE_S),
        NO_CAP: lambda: Fcfs(uncapped, own_copy_s),
        CAP_ALONE: lambda: Fcfs(shape, 0.0),
    }
    return makers[name]()


def run_closed(name: str, cell: Cell, steps: int) -> Measured:
    """A crowd that never stops asking, for `steps` steps."""
    policy, crowd = policy_of(name, cell), Crowd(cell)
    meter = Meter(shape_of(cell).max_num_seqs)
    _submit(policy, meter, crowd.first_jobs())
    # what waits is most of the memory, and lives long: the collector need not look at it again
    gc.collect()
    gc.freeze()
    done = 0
    while done < steps:
        facts = policy.step()
        meter.stepped(facts)
        done += facts.batch > 0
        for ended in facts.finished:
            _submit(policy, meter, crowd.after(ended))
    gc.unfreeze()
    return meter.measured(crowd.residents)


def _submit(policy: Policy, meter: Meter, jobs: Iterable[Job]) -> None:
    for job in jobs:
        meter.submitted(job)
        policy.submit(job)


def run_trace(name: str, cell: Cell) -> float:
    """Seconds until all that the crowd asks at first is answered.

    Raises: RuntimeError: it never is.
    """
    policy, crowd = policy_of(name, cell), Crowd(cell)
    busiest_first = name == CAP_ALONE
    jobs = crowd.first_jobs_of_the_busiest_first() if busiest_first else list(crowd.first_jobs())
    for job in jobs:
        policy.submit(job)
    left = len(jobs)
    for _ in range(TRACE_STEPS_LIMIT):
        facts = policy.step()
        left -= len(facts.finished)
        if not left:
            return facts.now_s
    raise RuntimeError(f"{name}, {cell.name}: {left} jobs were not answered")


def wait_bound_steps(cell: Cell) -> int:
    """⌈N·k/M⌉·T of the design with one tenant (N = 1), its last adapter (k = all that demand) and T
    as the core counts it: a turn, its soft close and the steps of a swap."""
    return -(-cell.demanding // cell.max_loras) * longest_turn(engine_limits(cell))
