"""Runs policies in cells: a closed crowd for a number of steps, or one finite trace to its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks.fairness_baselines import Fcfs
from benchmarks.fairness_crowd import Cell, Crowd
from benchmarks.fairness_engine import Turns, limits_of
from benchmarks.fairness_meter import Measured, Meter
from benchmarks.fairness_policy import COPY_S, COPY_SLOWDOWN, SWAP_IN_STEP_S, Policy, Shape
from engine_svc.core.limits import quantum_floor, turn_steps
from engine_svc.types import EngineLimits

TURNS, SKIP, SLICE = "loraplex", "FCFS, skips", "FCFS, 2 s slices"
#: the same two with loraplex's copies, which leaves nothing but the scheduling to compare
SKIP_COPY, SLICE_COPY = "FCFS, skips, own copies", "FCFS, 2 s slices, own copies"
POLICIES = (TURNS, SKIP, SLICE)
SLICE_S = 2.0
#: with few places the quantum ends turns, with 32 and more the steps do: 300 turns a place and 20
#: rounds leave 16 steps a turn
TURN_MAX_STEPS = 14
#: the least that keeps what one step and a soft close overdraw below a turn
STEPS_A_QUANTUM = 2
#: a policy that has not finished the trace after so many steps fails the benchmark
TRACE_STEPS_LIMIT = 10**7


def shape_of(cell: Cell) -> Shape:
    """Two sequences an adapter, and as many prompt tokens as decodes in a step."""
    seats = max(16, 2 * cell.max_loras)
    return Shape(cell.max_loras, seats, 2 * seats)


def engine_limits(cell: Cell) -> EngineLimits:
    """Short turns: many rounds in few steps."""
    limits = limits_of(shape_of(cell), quantum=0, turn_max_steps=TURN_MAX_STEPS)
    return dataclasses.replace(limits, quantum=STEPS_A_QUANTUM * quantum_floor(limits))


def policy_of(name: str, cell: Cell) -> Policy:
    own_copy_s = COPY_S * COPY_SLOWDOWN
    makers: dict[str, Callable[[], Policy]] = {
        TURNS: lambda: Turns(engine_limits(cell)),
        SKIP: lambda: Fcfs(shape_of(cell), SWAP_IN_STEP_S),
        SLICE: lambda: Fcfs(shape_of(cell), SWAP_IN_STEP_S, SLICE_S),
        SKIP_COPY: lambda: Fcfs(shape_of(cell), own_copy_s),
        SLICE_COPY: lambda: Fcfs(shape_of(cell), own_copy_s, SLICE_S),
    }
    return makers[name]()


def run_closed(name: str, cell: Cell, steps: int) -> Measured:
    """A crowd that never stops asking, for `steps` steps."""
    policy, crowd = policy_of(name, cell), Crowd(cell)
    meter = Meter(shape_of(cell).max_num_seqs)
    for job in crowd.first_jobs():
        meter.submitted(job)
        policy.submit(job)
    done = 0
    while done < steps:
        facts = policy.step()
        meter.stepped(facts)
        done += facts.batch > 0
        for ended in facts.finished:
            for job in crowd.after(ended):
                meter.submitted(job)
                policy.submit(job)
    return meter.measured(crowd.residents)


def run_trace(name: str, cell: Cell) -> float:
    """Seconds until all that the crowd asks at first is answered.

    Raises: RuntimeError: it never is.
    """
    policy, left, now_s = policy_of(name, cell), 0, 0.0
    for job in Crowd(cell).first_jobs():
        policy.submit(job)
        left += 1
    for _ in range(TRACE_STEPS_LIMIT):
        facts = policy.step()
        left -= len(facts.finished)
        now_s = facts.now_s
        if not left:
            return now_s
    raise RuntimeError(f"{name}, {cell.name}: {left} jobs were not answered")


def wait_bound_steps(cell: Cell) -> int:
    """⌈N·k/M⌉·T of the design with one tenant (N = 1), its last adapter (k = all that demand) and T
    as the core counts it: a turn, its soft close and the steps of a swap."""
    return -(-cell.demanding // cell.max_loras) * turn_steps(engine_limits(cell))
