"""What one plan costs the core: 256 running sequences while 10,000 flows ask for places.

    python -m benchmarks.plan_cost [--flows 10000] [--steps 600] [--max-loras 64]

Weights arrive at once and the model is nobody. Time is the core's thread's own: what other
processes do meanwhile is not counted. A step counts when 95 % of the seats are taken; every
finished request is followed by another of the same flow, so all flows go on demanding. A turn lasts
until its adapter's part of the seats is answered, so on average 4 sequences start, 4 end and, with
64 places, one adapter is swapped in every step. `make bench-fairness` records the row.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import replace

from benchmarks.shared.harness import Recorder
from engine_svc.core.engine import EngineCore
from engine_svc.core.limits import quantum_floor
from engine_svc.types import (
    AdapterRef,
    EngineLimits,
    Failure,
    FlowKey,
    HostSpan,
    LateInputs,
    Request,
    RequestEnded,
    Sample,
    SamplingParams,
    ServiceClass,
    SlotLoad,
    StepPlan,
    StepResult,
    WeightsReady,
)

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
NUM_SEQS = 256
#: steps to try for each that counts
STEPS_A_SAMPLE = 20
GOAL_CASE = "planning, 256 sequences, 10,000 flows"


class NobodyRunner:
    """Token 1 for every seat that samples, at once."""

    def __init__(self) -> None:
        self._results: deque[StepResult] = deque()

    def forward(self, plan: StepPlan) -> None:
        samples = tuple(Sample(seat, 1) for c in plan.chunks for seat in c.sample_seats)
        self._results.append(StepResult(plan.step, samples))

    def sample(self, plan: StepPlan, late: LateInputs) -> None:
        pass

    def collect(self, step: int) -> StepResult:
        return self._results.popleft()


class InstantWriter:
    """Every copy is done at the next poll."""

    def __init__(self) -> None:
        self._loads: list[SlotLoad] = []

    def start(self, load: SlotLoad) -> None:
        self._loads.append(load)

    def poll(self) -> tuple[tuple[SlotLoad, Failure | None], ...]:
        done, self._loads = self._loads, []
        return tuple((load, None) for load in done)


class InstantWeights:
    """Every adapter is on the host at the next poll."""

    def __init__(self) -> None:
        self._wanted: dict[str, None] = {}

    def want(self, ref: AdapterRef, rank: int) -> None:
        self._wanted[ref.digest] = None

    def drop(self, digest: str) -> None:
        pass

    def poll(self) -> tuple[WeightsReady, ...]:
        wanted, self._wanted = self._wanted, {}
        return tuple(WeightsReady(d, HostSpan(0, 1), 2, 1, "host", 0.0) for d in wanted)


class ThreadClock:
    """Seconds that this thread computed."""

    def now(self) -> float:
        return time.thread_time()


def build(num_flows: int, max_loras: int, runner: NobodyRunner) -> EngineCore:
    limits = EngineLimits(
        max_loras=max_loras, max_num_seqs=NUM_SEQS, max_num_batched_tokens=1024,
        num_pages=200_000, page_size=16, page_bytes=4096, num_slots=4 * max_loras,
        context_tokens=2048, max_queued_requests=2**20, max_queued_tokens=2**40,
        max_queue_wait_s=1e9, prefix_cache=False, max_wanted=2 * num_flows,
    )  # fmt: skip
    service = seats_a_place(max_loras) * (PROMPT_TOKENS + 2 * OUTPUT_TOKENS)
    limits = replace(limits, quantum=max(quantum_floor(limits), service))
    return EngineCore(limits, runner, InstantWriter(), InstantWeights(), ThreadClock())


def seats_a_place(max_loras: int) -> int:
    return -(-NUM_SEQS // max_loras)


def measure(num_flows: int, max_loras: int, num_steps: int) -> dict[str, object]:
    """Raises: RuntimeError: the seats are hardly ever taken."""
    plans, commits = samples(num_flows, max_loras, num_steps)
    plans.sort()
    return {
        "benchmark": "plan_cost", "flows": num_flows, "sequences": NUM_SEQS,
        "max_loras": max_loras, "steps": num_steps,
        "plan_us_median": round(statistics.median(plans), 1),
        "plan_us_p99": round(plans[int(0.99 * len(plans))], 1),
        "commit_us_median": round(statistics.median(commits), 1),
        "python": sys.version.split()[0],
    }  # fmt: skip


def record(recorder: Recorder, num_steps: int = 600) -> None:
    """The row that has a goal, with all its samples."""
    plans, commits = samples(10_000, 64, num_steps)
    recorder.add(GOAL_CASE, plans, "µs", better="lower")
    recorder.add(f"{GOAL_CASE}: commit", commits, "µs", better="lower")


def samples(
    num_flows: int, max_loras: int, num_steps: int, runner: NobodyRunner | None = None
) -> tuple[list[float], list[float]]:
    """µs of each plan and of each commit."""
    core = build(num_flows, max_loras, runner or NobodyRunner())
    refs = [AdapterRef(f"a{i}", 1, f"sha256:{i:064x}") for i in range(num_flows)]
    flow_of: dict[str, int] = {}
    prompt = tuple(range(PROMPT_TOKENS))
    numbers = itertools.count()

    def submit(number: int) -> None:
        request_id = f"r{next(numbers)}"
        flow_of[request_id] = number
        key = FlowKey(ServiceClass.INTERACTIVE, f"tenant{number % 100}", refs[number].digest)
        sampling = SamplingParams(OUTPUT_TOKENS, seed=number)
        core.submit(Request(request_id, key, prompt, sampling, time.thread_time(), refs[number]))

    for number in range(num_flows):
        for _ in range(seats_a_place(max_loras)):
            submit(number)
    plans: list[float] = []
    commits: list[float] = []
    gc.collect()
    gc.freeze()
    for _ in range(STEPS_A_SAMPLE * num_steps):
        report = core.step()
        if report.num_sequences >= 0.95 * NUM_SEQS:
            plans.append(report.plan_s * 1e6)
            commits.append(report.commit_s * 1e6)
        for item in core.take_outputs():
            if isinstance(item, RequestEnded):
                submit(flow_of.pop(item.request_id))
        if len(plans) == num_steps:
            gc.unfreeze()
            return plans, commits
    raise RuntimeError(
        f"only {len(plans)} of {STEPS_A_SAMPLE * num_steps} steps had {NUM_SEQS} sequences"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flows", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--max-loras", type=int, default=64)
    args = parser.parse_args()
    print(json.dumps(measure(args.flows, args.max_loras, args.steps)))


if __name__ == "__main__":
    main()
