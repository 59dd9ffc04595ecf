"""What the field does, as policies of the simulator: first come, first served.

An adapter is *active* while a sequence of it runs; at most max_loras are. The queue is scanned in
order of arrival past every request whose adapter is not active once no place is free. With
`slice_s` an adapter that has been active for so long takes nobody new while others wait.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass

from benchmarks.fairness.policy import Job, Shape, StepFacts, step_s


@dataclass(slots=True, eq=False)
class _Running:
    job: Job
    prompt_left: int
    output_left: int


@dataclass(slots=True)
class _Active:
    since_s: float
    sequences: int = 0


class Fcfs:
    """`swap_s` is paid inside the step that first runs an adapter without a slot."""

    def __init__(self, shape: Shape, swap_s: float, slice_s: float | None = None) -> None:
        self._shape, self._swap_s, self._slice_s = shape, swap_s, slice_s
        self._now_s = 0.0
        self._orders = 0
        self._running: list[_Running] = []
        self._queues: dict[int, deque[tuple[int, Job]]] = {}
        #: first requests of flows by order of arrival; an entry is old when it is not the first
        self._heads: list[tuple[int, int]] = []
        self._active: dict[int, _Active] = {}
        self._slots: OrderedDict[int, None] = OrderedDict()

    def submit(self, job: Job) -> None:
        queue = self._queues.setdefault(job.flow, deque())
        queue.append((self._orders, job))
        if len(queue) == 1:
            heapq.heappush(self._heads, (self._orders, job.flow))
        self._orders += 1

    def step(self) -> StepFacts:
        swaps = self._start()
        left = self._shape.max_num_batched_tokens
        served: dict[int, int] = {}
        finished: list[Job] = []
        prompt_tokens = batch = 0
        for run in self._running:
            if run.prompt_left:
                tokens = min(run.prompt_left, left)
                run.prompt_left -= tokens
                prompt_tokens += tokens
                service = tokens
                # the prompt's last chunk samples the first token
                run.output_left -= run.prompt_left == 0
            else:
                tokens = min(1, left)
                run.output_left -= tokens
                service = 2 * tokens
            left -= tokens
            batch += tokens > 0
            served[run.job.flow] = served.get(run.job.flow, 0) + service
            if run.output_left <= 0:
                finished.append(run.job)
        self._now_s += step_s(batch, len(served), prompt_tokens) + swaps * self._swap_s
        if finished:
            self._leave(finished)
        return StepFacts(served, batch, swaps, 0, finished, self._now_s)

    def _start(self) -> int:
        """Fill the seats; returns the adapters that had to be brought in."""
        swaps, seats = 0, self._shape.max_num_seqs - len(self._running)
        if not seats:
            return 0
        places = self._shape.max_loras
        others_wait = len(self._queues) > sum(flow in self._queues for flow in self._active)
        open_heads = [
            (self._queues[flow][0][0], flow)
            for flow, active in self._active.items()
            if flow in self._queues and not (others_wait and self._slice_is_over(active))
        ]
        heapq.heapify(open_heads)
        while seats:
            outside = self._first_outside() if len(self._active) < places else None
            inside = open_heads[0] if open_heads else None
            if inside is None and outside is None:
                break
            if inside is None or (outside is not None and outside < inside):
                assert outside is not None
                flow = outside[1]
                swaps += self._activate(flow)
            else:
                flow = heapq.heappop(open_heads)[1]
            queue = self._queues[flow]
            _, job = queue.popleft()
            self._active[flow].sequences += 1
            self._running.append(_Running(job, job.prompt, job.output))
            seats -= 1
            if queue:
                heapq.heappush(open_heads, (queue[0][0], flow))
                heapq.heappush(self._heads, (queue[0][0], flow))
            else:
                del self._queues[flow]
        return swaps

    def _slice_is_over(self, active: _Active) -> bool:
        return self._slice_s is not None and self._now_s - active.since_s >= self._slice_s

    def _first_outside(self) -> tuple[int, int] | None:
        """The oldest request of an adapter that is not active."""
        skipped = []
        found = None
        while self._heads:
            order, flow = self._heads[0]
            queue = self._queues.get(flow)
            if not queue or queue[0][0] != order:
                heapq.heappop(self._heads)
            elif flow in self._active:
                skipped.append(heapq.heappop(self._heads))
            else:
                found = (order, flow)
                break
        for head in skipped:
            heapq.heappush(self._heads, head)
        return found

    def _activate(self, flow: int) -> int:
        self._active[flow] = _Active(self._now_s)
        if flow in self._slots:
            self._slots.move_to_end(flow)
            return 0
        while len(self._slots) >= self._shape.max_loras:
            oldest = next(one for one in self._slots if one not in self._active)
            del self._slots[oldest]
        self._slots[flow] = None
        return 1

    def _leave(self, finished: list[Job]) -> None:
        self._running = [run for run in self._running if run.output_left > 0]
        for job in finished:
            active = self._active[job.flow]
            active.sequences -= 1
            if not active.sequences:
                del self._active[job.flow]
