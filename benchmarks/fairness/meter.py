"""What is measured of a run: shares, waits, fill, swaps and pauses.

A flow's wait is a run of steps in which it had something to run and nothing of it was planned: from
its arrival, or from the step after its last one, to its next. Waits that have not ended count with
what they have so far: a policy cannot hide a flow by never serving it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.fairness.policy import Job, StepFacts


@dataclass(frozen=True, slots=True)
class Measured:
    """One policy in one cell."""

    steps: int
    seconds: float
    jain: float
    #: turns of the resident that had the fewest
    rounds: int
    worst_wait_steps: int
    p99_wait_steps: int
    worst_wait_s: float
    full_batch_share: float
    adapters_a_step: float
    swaps_a_thousand: float
    pauses_a_thousand: float
    #: longest waits of the residents in steps, the luckiest first, at 0, 1 … 100 % of them
    longest_waits: tuple[int, ...] = ()


class Meter:
    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._steps = 0
        self._now_s = 0.0
        self._open_jobs: Counter[int] = Counter()
        #: flow → (step, time) at which its present wait began
        self._waiting: dict[int, tuple[int, float]] = {}
        self._running: set[int] = set()
        self._waits: Counter[int] = Counter()
        #: flow → its longest wait
        self._longest: dict[int, int] = {}
        self._worst_s = 0.0
        self._turns: Counter[int] = Counter()
        self._service: Counter[int] = Counter()
        self._full = self._adapters = self._swaps = self._pauses = 0

    def submitted(self, job: Job) -> None:
        self._open_jobs[job.flow] += 1
        if job.flow not in self._waiting and job.flow not in self._running:
            self._waiting[job.flow] = (self._steps, self._now_s)

    def stepped(self, facts: StepFacts) -> None:
        if not facts.batch:
            self._now_s = facts.now_s
            return
        served = facts.served
        for flow, service in served.items():
            self._service[flow] += service
            if flow not in self._running:
                self._end_wait(flow)
                self._turns[flow] += 1
        for flow in self._running - served.keys():
            if self._open_jobs[flow]:
                self._waiting[flow] = (self._steps, self._now_s)
        self._running = set(served)
        self._steps += 1
        self._now_s = facts.now_s
        self._full += facts.batch >= self._max_num_seqs
        self._adapters += len(served)
        self._swaps += facts.swaps
        self._pauses += facts.pauses
        for job in facts.finished:
            self._open_jobs[job.flow] -= 1
            if not self._open_jobs[job.flow]:
                self._running.discard(job.flow)

    def _end_wait(self, flow: int) -> None:
        step, since_s = self._waiting.pop(flow, (self._steps, self._now_s))
        wait = self._steps - step
        self._waits[wait] += 1
        if wait > self._longest.get(flow, -1):
            self._longest[flow] = wait
        self._worst_s = max(self._worst_s, self._now_s - since_s)

    def measured(self, residents: Sequence[int]) -> Measured:
        """`residents` demanded throughout."""
        for flow in list(self._waiting):
            self._end_wait(flow)
        quantiles = _quantiles(self._waits, 100)
        longest = Counter(self._longest.get(flow, 0) for flow in residents)
        steps = max(1, self._steps)
        return Measured(
            steps=self._steps,
            seconds=self._now_s,
            jain=jain(self._service[flow] for flow in residents),
            rounds=min(self._turns[flow] for flow in residents),
            worst_wait_steps=quantiles[-1],
            p99_wait_steps=quantiles[-2],
            worst_wait_s=self._worst_s,
            full_batch_share=self._full / steps,
            adapters_a_step=self._adapters / steps,
            swaps_a_thousand=1000 * self._swaps / steps,
            pauses_a_thousand=1000 * self._pauses / steps,
            longest_waits=tuple(_quantiles(longest, 100)),
        )


def jain(values: Iterable[float]) -> float:
    """(Σx)² / n·Σx²: 1 when all are equal, 1/n when one has everything."""
    numbers = list(values)
    squares = sum(value * value for value in numbers)
    return sum(numbers) ** 2 / (len(numbers) * squares) if squares else 0.0


def _quantiles(waits: Counter[int], parts: int) -> list[int]:
    """The smallest wait, then that below which 1 … `parts` parts of the waits lie."""
    total, found, seen = sum(waits.values()), list[int](), 0
    for wait, count in sorted(waits.items()):
        seen += count
        while len(found) <= parts and len(found) * total <= seen * parts:
            found.append(wait)
    return found or [0] * (parts + 1)
