"""Fakes of the core's four ports that notice every mix-up of pages, slots and seats.

The fake arena keeps for each position who wrote it (adapter digest, position, token), and for each
page of a slot whose bytes it holds. A chunk must find exactly its own history and its own adapter;
a sampled token is a pure function of (digest, seed, choice, all tokens before it).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from engine_svc.step_chunks import Chunk
from engine_svc.types import (
    BASE_DIGEST,
    NO_SLOT,
    AdapterRef,
    EngineLimits,
    Failure,
    HostSpan,
    LateInputs,
    PromptLogprobs,
    Sample,
    SamplingParams,
    SlotLoad,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WeightsFailed,
    WeightsReady,
)

VOCABULARY = 40


def next_token(digest: str, seed: int, choice: int, tokens: tuple[int, ...]) -> int:
    """What the fake model samples after `tokens`."""
    text = f"{digest}|{seed}|{choice}|{tokens}"
    return zlib.crc32(text.encode()) % VOCABULARY


@dataclass
class FakeClock:
    now_s: float = 100.0

    def now(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class FakeArena:
    """Page contents: (digest, position, token) per position, or an adapter's page image."""

    page_size: int
    cells: dict[int, list[object]] = field(default_factory=dict)
    #: pages that a copy from the host is writing
    filling: set[int] = field(default_factory=set)

    def page(self, page_id: int) -> list[object]:
        return self.cells.setdefault(page_id, ["poison"] * self.page_size)


@dataclass
class _Seat:
    sampling: SamplingParams
    choice: int
    tokens: list[int]


class FakeRunner:
    """Executes plans when they are forwarded (`late` false) or only when collected (`late`)."""

    def __init__(self, limits: EngineLimits, arena: FakeArena, clock: FakeClock) -> None:
        self.limits = limits
        self.arena = arena
        self.clock = clock
        self.late: Callable[[], bool] = lambda: True
        self.not_finite: set[str] = set()
        self.on_forward: Callable[[StepPlan], None] = lambda plan: None
        self.plans: list[StepPlan] = []
        self.queued: deque[StepPlan] = deque()
        self.results: dict[int, StepResult] = {}
        self.uncollected: deque[StepPlan] = deque()
        self._seats: dict[int, _Seat] = {}
        self._slots: dict[int, tuple[str, tuple[int, ...]]] = {}

    def forward(self, plan: StepPlan) -> None:
        self._check_plan(plan)
        self.on_forward(plan)
        self.plans.append(plan)
        self.queued.append(plan)
        self.uncollected.append(plan)
        assert len(self.uncollected) <= self.limits.run_ahead + 1
        assert plan.run_ahead == len(self.uncollected) - 1

    def sample(self, plan: StepPlan, late: LateInputs) -> None:
        assert plan is self.queued[-1]
        if not self.late():
            self._execute_until(plan.step)

    def collect(self, step: int) -> StepResult:
        assert self.uncollected.popleft().step == step
        self._execute_until(step)
        return self.results.pop(step)

    def pages_in_use(self) -> set[int]:
        """Pages that steps launched and not collected read or write."""
        used: set[int] = set()
        for plan in self.uncollected:
            for copy in plan.page_copies:
                used.update((copy.source, copy.target))
            for chunk in plan.chunks:
                used.update(chunk.page_ids)
                if chunk.slot != NO_SLOT:
                    used.update(self._pages_of_slot(chunk.slot))
        return used

    def _pages_of_slot(self, slot: int) -> tuple[int, ...]:
        for plan in reversed(self.queued):
            for binding in plan.slot_bindings:
                if binding.slot == slot:
                    return binding.page_ids
        return self._slots[slot][1]

    def _check_plan(self, plan: StepPlan) -> None:
        limits = self.limits
        assert plan.chunks, "an empty plan was launched"
        assert plan.num_adapters <= limits.max_loras
        assert plan.num_tokens <= limits.max_num_batched_tokens
        slots = [chunk.slot for chunk in plan.chunks]
        runs = [s for i, s in enumerate(slots) if i == 0 or slots[i - 1] != s]
        assert len(runs) == len(set(runs)), "rows of one slot are apart"
        assert NO_SLOT not in runs[:-1], "the base is not last"
        seats = [chunk.seat for chunk in plan.chunks]
        assert len(seats) == len(set(seats))
        for chunk in plan.chunks:
            assert chunk.num_tokens >= 1
            assert len(chunk.page_ids) == -(-(chunk.start + chunk.num_tokens) // limits.page_size)
            assert not self.arena.filling.intersection(chunk.page_ids)
        self._check_written_pages(plan)

    def _check_written_pages(self, plan: StepPlan) -> None:
        written: set[int] = set()
        for chunk in plan.chunks:
            own = set(chunk.page_ids[chunk.start // self.limits.page_size :])
            assert not own & written, "two chunks write one page"
            written |= own
        for chunk in plan.chunks:
            read = set(chunk.page_ids[: chunk.start // self.limits.page_size])
            assert not read & written, "a chunk reads a page that another one writes"
        targets = [copy.target for copy in plan.page_copies]
        assert len(targets) == len(set(targets))

    def _execute_until(self, step: int) -> None:
        while self.queued and self.queued[0].step <= step:
            plan = self.queued.popleft()
            self.results[plan.step] = self._execute(plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        for binding in plan.slot_bindings:
            self._slots[binding.slot] = (binding.digest, binding.page_ids)
        for copy in plan.page_copies:
            self.arena.cells[copy.target] = list(self.arena.page(copy.source))
        for opening in plan.seat_openings:
            tokens = [*opening.prompt_token_ids, *opening.output_token_ids]
            self._seats[opening.seat] = _Seat(opening.sampling, opening.choice, tokens)
        samples: list[Sample] = []
        logprobs: list[PromptLogprobs] = []
        for chunk in plan.chunks:
            digest = self._adapter(chunk)
            self._compute(chunk, digest)
            for seat in chunk.sample_seats:
                samples.append(self._sample(seat, digest, chunk.start + chunk.num_tokens))
            if chunk.prompt_logprobs is not None:
                logprobs.append(self._prompt_logprobs(chunk))
        return StepResult(plan.step, tuple(samples), tuple(logprobs), 0.001)

    def _adapter(self, chunk: Chunk) -> str:
        if chunk.slot == NO_SLOT:
            return BASE_DIGEST
        digest, page_ids = self._slots[chunk.slot]
        for index, page_id in enumerate(page_ids):
            assert self.arena.cells[page_id] == ["adapter", digest, index], "overwritten adapter"
        return digest

    def _compute(self, chunk: Chunk, digest: str) -> None:
        size, seat = self.limits.page_size, self._seats[chunk.seat]
        tokens = chunk.token_ids or (seat.tokens[-1],)
        assert len(tokens) == chunk.num_tokens
        assert tuple(seat.tokens[chunk.start : chunk.start + len(tokens)]) == tokens
        for offset, token in enumerate(tokens):
            position = chunk.start + offset
            page_id = chunk.page_ids[position // size]
            page = self.arena.page(page_id)
            if len(page) != size:
                page = self.arena.cells[page_id] = ["poison"] * size
            page[position % size] = (digest, position, token)
        for position in range(chunk.start):
            cell = self.arena.page(chunk.page_ids[position // size])[position % size]
            assert cell == (digest, position, seat.tokens[position]), "a wrong history was read"

    def _sample(self, seat_id: int, digest: str, end: int) -> Sample:
        seat = self._seats[seat_id]
        assert len(seat.tokens) == end
        if digest in self.not_finite:
            seat.tokens.append(-1)
            return Sample(seat_id, -1)
        token = next_token(digest, seat.sampling.seed, seat.choice, tuple(seat.tokens))
        seat.tokens.append(token)
        return Sample(seat_id, token)

    def _prompt_logprobs(self, chunk: Chunk) -> PromptLogprobs:
        following = [*chunk.token_ids[1:]]
        if chunk.next_prompt_token >= 0:
            following.append(chunk.next_prompt_token)
        tokens = tuple(TokenLogprobs(t, -float(chunk.start + i)) for i, t in enumerate(following))
        return PromptLogprobs(chunk.seat, chunk.start + 1, tokens)


class FakeWriter:
    """Writes an adapter's bytes at once, the earliest moment at which it could do harm."""

    def __init__(self, arena: FakeArena, runner: FakeRunner) -> None:
        self.arena = arena
        self.runner = runner
        self.delay: Callable[[], int] = lambda: 0
        self.failing: set[str] = set()
        self._loads: list[list[object]] = []

    def start(self, load: SlotLoad) -> None:
        assert not self.runner.pages_in_use().intersection(load.page_ids), "a step has these pages"
        for index, page_id in enumerate(load.page_ids):
            self.arena.cells[page_id] = ["adapter", load.digest, index]
        self.arena.filling.update(load.page_ids)
        self._loads.append([load, self.delay()])

    def poll(self) -> tuple[tuple[SlotLoad, Failure | None], ...]:
        done: list[tuple[SlotLoad, Failure | None]] = []
        for entry in list(self._loads):
            load, left = entry
            assert isinstance(load, SlotLoad)
            assert isinstance(left, int)
            if left > 0:
                entry[1] = left - 1
                continue
            self._loads.remove(entry)
            self.arena.filling.difference_update(load.page_ids)
            failure = Failure("INTERNAL", "INVARIANT", "the copy failed")
            done.append((load, failure if load.digest in self.failing else None))
        return tuple(done)


class FakeWeights:
    """Answers each want once, after a delay in polls; may fail by digest."""

    def __init__(self, num_pages: Callable[[str], int]) -> None:
        self.num_pages = num_pages
        self.delay: Callable[[], int] = lambda: 0
        self.failing: set[str] = set()
        self.wants: list[tuple[str, int]] = []
        self.dropped: list[str] = []
        self.held: set[str] = set()
        self.asked: dict[str, int] = {}

    def want(self, ref: AdapterRef, rank: int) -> None:
        assert ref.digest not in self.held, "wanted again before it was dropped"
        self.wants.append((ref.digest, rank))
        self.asked.setdefault(ref.digest, self.delay())

    def drop(self, digest: str) -> None:
        self.held.remove(digest)
        self.dropped.append(digest)

    def poll(self) -> tuple[WeightsReady | WeightsFailed, ...]:
        answers: list[WeightsReady | WeightsFailed] = []
        for digest, left in list(self.asked.items()):
            if left > 0:
                self.asked[digest] = left - 1
                continue
            del self.asked[digest]
            if digest in self.failing:
                gone = Failure("DATA_LOSS", "DIGEST_MISMATCH", f"{digest} is corrupt")
                answers.append(WeightsFailed(digest, gone))
                continue
            self.held.add(digest)
            pages = self.num_pages(digest)
            answers.append(WeightsReady(digest, HostSpan(0, pages), pages, pages, "store", 0.5))
        return tuple(answers)
