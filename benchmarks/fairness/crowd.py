"""Who asks for what: clients of many adapters, as seeded draws.

*Residents* ask again as soon as they are answered, so their flows demand throughout; one in ten
flows is a *guest*, whose name sends a burst once and is replaced by the registered one that has
been away longest: itself, where all that are registered demand.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.fairness.policy import Job

REGISTERED = 10_000
DEMANDING_A_PLACE = 300
GUEST_SHARE = 0.1
GUEST_JOBS = 2
CLIENTS_A_FLOW = 6
#: so many that hardly ever all of them are answered in one step: the flow demands throughout
MIN_CLIENTS = 4
#: a thirty-second of the field's usual 8 … 512, so that 100,000 steps hold more than 20 rounds
PROMPT_TOKENS, OUTPUT_TOKENS = (2, 16), (2, 16)
ZIPF_EXPONENT = 1.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of the table. `zipf` False: all flows have the same number of clients."""

    max_loras: int
    zipf: bool

    @property
    def demanding(self) -> int:
        return min(REGISTERED, DEMANDING_A_PLACE * self.max_loras)

    @property
    def name(self) -> str:
        return f"max_loras {self.max_loras}, {'Zipf' if self.zipf else 'uniform'}"


class Crowd:
    """Jobs of a cell; equal seeds draw equal sizes in equal order of asking."""

    def __init__(self, cell: Cell, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._numbers = 0
        names = list(range(REGISTERED))
        self._rng.shuffle(names)
        num_guests = int(cell.demanding * GUEST_SHARE)
        self.residents: Sequence[int] = names[: cell.demanding - num_guests]
        self._guests = names[cell.demanding - num_guests : cell.demanding]
        #: who comes when a guest leaves; a leaver goes to the tail
        self._outside = deque(names[cell.demanding :])
        self._clients = _clients(cell, len(self.residents))
        self._guest_left = dict.fromkeys(self._guests, GUEST_JOBS)

    def first_jobs(self) -> Iterator[Job]:
        """What everybody asks at first, in random order."""
        flows = [
            flow
            for flow, count in zip(self.residents, self._clients, strict=True)
            for _ in range(count)
        ]
        flows += [flow for flow in self._guests for _ in range(GUEST_JOBS)]
        self._rng.shuffle(flows)
        return (self._job(flow) for flow in flows)

    def first_jobs_of_the_busiest_first(self) -> list[Job]:
        """The same, but each adapter's jobs together, and first who has the most to generate."""
        by_flow: dict[int, list[Job]] = {}
        for job in self.first_jobs():
            by_flow.setdefault(job.flow, []).append(job)
        order = sorted(by_flow.values(), key=lambda jobs: -sum(job.output for job in jobs))
        return [job for jobs in order for job in jobs]

    def after(self, job: Job) -> list[Job]:
        """What is asked because `job` was answered."""
        left = self._guest_left.get(job.flow)
        if left is None:
            return [self._job(job.flow)]
        if left > 1:
            self._guest_left[job.flow] = left - 1
            return []
        del self._guest_left[job.flow]
        self._outside.append(job.flow)
        flow = self._outside.popleft()
        self._guest_left[flow] = GUEST_JOBS
        return [self._job(flow) for _ in range(GUEST_JOBS)]

    def _job(self, flow: int) -> Job:
        self._numbers += 1
        prompt, output = self._rng.randint(*PROMPT_TOKENS), self._rng.randint(*OUTPUT_TOKENS)
        return Job(self._numbers, flow, prompt, output)


def _clients(cell: Cell, num_flows: int) -> list[int]:
    """Clients of each resident; Zipf shares the same total by 1 / rank."""
    if not cell.zipf:
        return [CLIENTS_A_FLOW] * num_flows
    weights = [1.0 / (rank + 1) ** ZIPF_EXPONENT for rank in range(num_flows)]
    total = (CLIENTS_A_FLOW - MIN_CLIENTS) * num_flows
    scale = total / sum(weights)
    return [MIN_CLIENTS + int(scale * weight) for weight in weights]
