"""The core over a real runner and real bytes: steps execute late, loads write early, pages hold NaN
as soon as nobody reads them.

Life(run, packed, seed, seats=…, tokens=…).live(); .check(Alone(other_run, packed))
"""

from __future__ import annotations

import random
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch

from engine_svc.core.engine import EngineCore
from engine_svc.core.ports import Runner
from engine_svc.model.site_table import SlotRow
from engine_svc.types import (
    BASE_DIGEST,
    NO_SLOT,
    AdapterRef,
    EngineLimits,
    Failure,
    FlowKey,
    HostSpan,
    LateInputs,
    Request,
    RequestEnded,
    SamplingParams,
    SequenceOutput,
    ServiceClass,
    SlotLoad,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WeightsReady,
)
from tests.support.core_fakes import FakeClock
from tests.support.direct_runner import DirectRunner, SeatedSequence

#: of the models that it drives
VOCABULARY, MAX_TOKENS = 131, 48
POISON = 0xFF  # four of them are a NaN of fp32


@dataclass(frozen=True)
class Packed:
    ref: AdapterRef
    num_pages: int
    data: bytes


class LateRunner:
    """Passes plans on when they are launched, or as late as their result is asked for. What a
    launch takes from the host, it takes at once: rows of slots."""

    def __init__(self, inner: Runner, chance: random.Random) -> None:
        self._inner, self._chance = inner, chance
        self._queued: deque[tuple[StepPlan, LateInputs]] = deque()
        bindings = cast("Any", inner)._bindings
        self._writer, bindings._slot_writer = bindings._slot_writer, self
        self._rows: dict[int, deque[SlotRow]] = defaultdict(deque)

    def forward(self, plan: StepPlan) -> None:
        for binding in plan.slot_bindings:
            row = self._writer.take_row(binding.slot, binding.digest)
            self._rows[binding.slot].append(row)

    def take_row(self, slot: int, digest: str) -> SlotRow:
        row = self._rows[slot].popleft()
        assert row.digest == digest
        return row

    def sample(self, plan: StepPlan, late: LateInputs) -> None:
        self._queued.append((plan, late))
        if self._chance.random() < 0.4:
            self._execute_until(plan.step)

    def collect(self, step: int) -> StepResult:
        self._execute_until(step)
        return self._inner.collect(step)

    def _execute_until(self, step: int) -> None:
        while self._queued and self._queued[0][0].step <= step:
            plan, late = self._queued.popleft()
            self._inner.forward(plan)
            self._inner.sample(plan, late)


class EarlyWriter:
    """The real slot writer, whose loads have written everything when `start` returns."""

    def __init__(self, run: DirectRunner, chance: random.Random) -> None:
        self._writer, self._chance = run.loaded.slot_writer, chance
        self._ended: list[tuple[SlotLoad, Failure | None]] = []

    def start(self, load: SlotLoad) -> None:
        self._writer.start(load)
        deadline = time.monotonic() + 30
        while not (ended := self._writer.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        self._ended.extend(ended)

    def poll(self) -> tuple[tuple[SlotLoad, Failure | None], ...]:
        if self._chance.random() < 0.3:
            return ()
        ended, self._ended = self._ended, []
        return tuple(ended)


class HostWeights:
    """Every adapter lies in the host region already."""

    def __init__(self, spans: dict[str, HostSpan], packed: Sequence[Packed]) -> None:
        self._spans, self._pages = spans, {one.ref.digest: one.num_pages for one in packed}
        self._asked: dict[str, None] = {}

    def want(self, ref: AdapterRef, rank: int) -> None:
        self._asked[ref.digest] = None

    def drop(self, digest: str) -> None:
        pass

    def poll(self) -> tuple[WeightsReady, ...]:
        asked, self._asked = self._asked, {}
        return tuple(
            WeightsReady(digest, self._spans[digest], self._pages[digest], 1, "host", 0.0)
            for digest in asked
        )


@dataclass
class Heard:
    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ended: RequestEnded | None = None
    cancelled: bool = False


class Life:
    """A core over the real runner and writer, and what its clients hear."""

    def __init__(
        self,
        run: DirectRunner,
        packed: Sequence[Packed],
        seed: int,
        *,
        seats: int,
        tokens: int,
        ranked: bool = False,
    ) -> None:
        """Args: tokens, of a step; ranked, some ask for log probabilities."""
        self.chance, self._ranked = random.Random(seed), ranked
        self._arena = run.loaded.runner._arena
        self.limits = EngineLimits(
            max_loras=2, num_slots=3, max_num_seqs=seats, max_num_batched_tokens=tokens,
            num_pages=self.chance.choice([22, 26, 34]), page_size=run.loaded.page_size,
            page_bytes=self._arena.page_bytes, context_tokens=run.loaded.context_tokens,
            turn_max_steps=self.chance.choice([2, 7]), closing_steps=1, min_chunk=8, run_ahead=1,
            max_queue_wait_s=1e9,
        )  # fmt: skip
        assert self.limits.num_pages <= run.loaded.num_pages
        self.core = EngineCore(
            self.limits, LateRunner(run.runner, self.chance), EarlyWriter(run, self.chance),
            HostWeights(run.spans, packed), FakeClock(),
        )  # fmt: skip
        self._refs: list[AdapterRef | None] = [None, *(one.ref for one in packed)]
        self.heard: dict[str, Heard] = {}
        self._overwrite(range(run.loaded.num_pages))

    def submit(self) -> None:
        chance, number = self.chance, len(self.heard)
        ref = chance.choice(self._refs)
        shared = [7] * chance.choice([0, 16, 37])
        prompt = (*shared, *(chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 30))))
        sampling = SamplingParams(
            max_tokens=chance.choice([1, 2, 9, MAX_TOKENS]), seed=number,
            n=min(chance.choice([1, 1, 2, 3]), self.limits.max_num_seqs),
            min_tokens=chance.choice([0, 3]),
            temperature=chance.choice([0.0, 0.0, 0.8]), top_k=chance.choice([0, 5]),
            frequency_penalty=chance.choice([0.0, 0.5]),
            eos_token_ids=chance.choice([(), (), tuple(range(0, VOCABULARY, 9))]),
        )  # fmt: skip
        if self._ranked:
            tops: list[int | None] = [None, 0, 20]
            sampling = replace(
                sampling, logprobs=chance.choice(tops), prompt_logprobs=chance.choice(tops)
            )
        digest = BASE_DIGEST if ref is None else ref.digest
        flow = FlowKey(ServiceClass.INTERACTIVE, chance.choice("tu"), digest)
        request = Request(f"r{number}", flow, prompt, sampling, 0.0, ref)
        self.heard[request.request_id] = Heard(request)
        self.core.submit(request)

    def step(self) -> bool:
        """Whether something was done."""
        idle = self.core.step().idle
        self._poison()
        for item in self.core.take_outputs():
            heard = self.heard[item.request_id]
            if isinstance(item, SequenceOutput):
                heard.tokens.setdefault(item.choice, []).extend(item.token_ids)
                heard.logprobs.setdefault(item.choice, []).extend(item.logprobs)
            elif isinstance(item, RequestEnded):
                heard.ended = item
        return not idle

    def live(self) -> None:
        """Requests come, some are cancelled, and all end."""
        for _ in range(130):
            if self.chance.random() < 0.25 and self.core.num_live < 9:
                self.submit()
            elif self.chance.random() < 0.04:
                self.cancel_one()
            else:
                self.step()
        left = 4000
        while self.core.num_live or self.step():
            self.step()
            left -= 1
            assert left, "requests never end"
        self.core.check_integrity()

    def check(self, alone: Alone) -> None:
        """Each request has heard what it hears alone."""
        for heard in self.heard.values():
            request, sampling = heard.request, heard.request.sampling
            assert heard.ended is not None
            assert heard.cancelled or heard.ended.failure is None, heard
            for choice, tokens in heard.tokens.items():
                one, prompt = alone.answer(request, choice, len(tokens))
                assert tokens == one.outputs, (request, choice)
                if sampling.logprobs is not None:
                    assert_close(heard.logprobs[choice], [s.logprobs for s in one.samples])
                if sampling.prompt_logprobs is not None and heard.ended.failure is None:
                    assert_close(heard.ended.prompt_logprobs, prompt)
            for choice in range(0 if heard.cancelled else sampling.n):
                said = heard.tokens[choice]
                stopped = len(said) > sampling.min_tokens and said[-1] in sampling.eos_token_ids
                assert stopped or len(said) == sampling.max_tokens

    def cancel_one(self) -> None:
        living = [heard for heard in self.heard.values() if heard.ended is None]
        if living:
            one = self.chance.choice(living)
            one.cancelled = True
            self.core.cancel(one.request.request_id)

    def _poison(self) -> None:
        """Pages that a load might take now hold nothing that anybody reads."""
        pool = self.core._books.memory.pool
        done = pool.committed_step
        self._overwrite([page for page in pool._free if pool._retired_step[page] <= done])

    def _overwrite(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._arena.page(page).fill_(POISON)
        if self._arena.bytes.is_cuda:
            # beside the steps in flight, before those that are launched from here on
            torch.cuda.current_stream().synchronize()


def assert_close(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs | None]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None
        assert ours.token_id == theirs.token_id
        values = [ours.logprob, *(value for _, value in ours.top)]
        assert values == pytest.approx([theirs.logprob, *(v for _, v in theirs.top)], abs=1e-3)


class Alone:
    """What a choice says when nobody else is there."""

    def __init__(self, run: DirectRunner, packed: Sequence[Packed]) -> None:
        self._run = run
        self._slots = {BASE_DIGEST: NO_SLOT}
        for slot, one in enumerate(packed):
            run.load_slot(slot, one.ref.digest, one.num_pages)
            self._slots[one.ref.digest] = slot

    def answer(
        self, request: Request, choice: int, num_tokens: int
    ) -> tuple[SeatedSequence, list[TokenLogprobs]]:
        """Its sequence, and the log probabilities of its prompt where they are asked for."""
        slot, prompt = self._slots[request.flow.digest], list(request.prompt_token_ids)
        one = SeatedSequence(0, slot, prompt, request.sampling, choice)
        ranked: list[TokenLogprobs] = []
        while len(one.outputs) < num_tokens:
            todo = min(16, len(one.tokens) - one.computed)
            top = request.sampling.prompt_logprobs
            for part in self._run.run([(one, todo)], prompt_logprobs=top).prompt_logprobs:
                ranked.extend(part.tokens)
        self._run.release(one)
        return one, ranked
