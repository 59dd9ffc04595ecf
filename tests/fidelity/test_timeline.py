"""One timeline with real bytes: the core and the GPU's way, late steps, poisoned pages.

Whatever the core plans, each request must get the tokens that it gets alone. A step executes when
it is launched, or as late as its result is asked for; a load writes its pages the moment it is
started; pages are overwritten with NaN as soon as their last step has committed.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_svc.core.engine import EngineCore
from engine_svc.core.ports import Runner
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
    WeightsReady,
)
from tests.support.core_fakes import FakeClock
from tests.support.direct_runner import WAY_OPTIONS, WAYS, DirectRunner, SeatedSequence
from tests.support.oracle import pack, write_checkpoint, write_peft_adapter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 9, "target_modules": "all-linear"},
    "DoRA and biases": {"r": 4, "target_modules": "all-linear", "use_dora": True, "bias": "all"},
    "vocabulary": {"r": 5, "target_modules": ["q_proj", "lm_head", "embed_tokens"]},
}
VOCABULARY, SEATS, MAX_TOKENS = 131, 5, 48
POISON = 0xFF  # four of them are a NaN of fp32


@dataclass(frozen=True)
class Packed:
    ref: AdapterRef
    num_pages: int
    data: bytes


class LateRunner:
    """Passes plans on when they are launched, or as late as their result is asked for."""

    def __init__(self, inner: Runner, chance: random.Random) -> None:
        self._inner, self._chance = inner, chance
        self._queued: deque[tuple[StepPlan, LateInputs]] = deque()

    def forward(self, plan: StepPlan) -> None:
        pass

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
    ended: RequestEnded | None = None
    cancelled: bool = False


class Life:
    """A core over the real runner and writer, and what its clients hear."""

    def __init__(self, run: DirectRunner, packed: Sequence[Packed], seed: int) -> None:
        self.chance = random.Random(seed)
        self._arena = run.loaded.runner._arena
        self.limits = EngineLimits(
            max_loras=2, num_slots=3, max_num_seqs=SEATS, max_num_batched_tokens=SEATS + 27,
            num_pages=self.chance.choice([22, 26, 34]), page_size=run.loaded.page_size,
            page_bytes=self._arena.page_bytes, context_tokens=run.loaded.context_tokens,
            turn_max_steps=self.chance.choice([2, 7]), closing_steps=1, min_chunk=8, run_ahead=1,
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
            n=chance.choice([1, 1, 2, 3]), min_tokens=chance.choice([0, 3]),
            temperature=chance.choice([0.0, 0.0, 0.8]), top_k=chance.choice([0, 5]),
            frequency_penalty=chance.choice([0.0, 0.5]),
            eos_token_ids=chance.choice([(), (), tuple(range(0, VOCABULARY, 9))]),
        )  # fmt: skip
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
            elif isinstance(item, RequestEnded):
                heard.ended = item
        return not idle

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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Packed]]:
    root = tmp_path_factory.mktemp("timeline")
    folder = write_checkpoint(root / "m", "Qwen2ForCausalLM", seed=8)
    shapes = DirectRunner(folder, arena_bytes=1 << 20)
    packed = []
    for seed, (name, config) in enumerate(ADAPTERS.items()):
        path = write_peft_adapter(folder, root / str(seed), seed=seed, lora_alpha=16, **config)
        digest, num_pages, data = pack(path, shapes.loaded.base, shapes.loaded.layout)
        packed.append(Packed(AdapterRef(name, 1, digest), num_pages, data))
    return folder, packed


def direct_runner(way: str, model: tuple[Path, list[Packed]], arena_bytes: int) -> DirectRunner:
    folder, packed = model
    options: dict[str, Any] = {
        "max_num_seqs": SEATS, "max_num_batched_tokens": SEATS + 27, "max_slots": 3,
        "arena_bytes": arena_bytes, **WAY_OPTIONS[way],
    }  # fmt: skip
    return DirectRunner(folder, {one.ref.digest: one.data for one in packed}, **options)


class Alone:
    """What a choice says when nobody else is there."""

    def __init__(self, run: DirectRunner, packed: Sequence[Packed]) -> None:
        self._run = run
        self._slots = {BASE_DIGEST: NO_SLOT}
        for slot, one in enumerate(packed):
            run.load_slot(slot, one.ref.digest, one.num_pages)
            self._slots[one.ref.digest] = slot

    def tokens(self, request: Request, choice: int, num_tokens: int) -> list[int]:
        slot = self._slots[request.flow.digest]
        prompt = list(request.prompt_token_ids)
        one = SeatedSequence(0, slot, prompt, request.sampling, choice)
        self._run.generate([one], num_tokens, chunk=16)
        self._run.release(one)
        return one.outputs


@pytest.fixture(scope="module", params=WAYS[1:])
def way(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def alone(way: str, model: tuple[Path, list[Packed]]) -> Iterator[Alone]:
    run = direct_runner(way, model, 1 << 20)
    yield Alone(run, model[1])
    run.close()


@pytest.mark.parametrize("seed", range(3))
def test_every_request_gets_its_own_tokens_whenever_steps_execute(
    way: str, model: tuple[Path, list[Packed]], alone: Alone, seed: int
) -> None:
    run = direct_runner(way, model, 34 * 9300)
    life = Life(run, model[1], seed)
    for _ in range(130):
        if life.chance.random() < 0.25 and life.core.num_live < 9:
            life.submit()
        elif life.chance.random() < 0.04:
            life.cancel_one()
        else:
            life.step()
    left = 4000
    while life.core.num_live or life.step():
        life.step()
        left -= 1
        assert left, "requests never end"
    life.core.check_integrity()
    assert life.core._books.num_preempted > 0
    for heard in life.heard.values():
        request = heard.request
        assert heard.ended is not None
        assert heard.cancelled or heard.ended.failure is None, heard
        for choice, tokens in heard.tokens.items():
            assert tokens == alone.tokens(request, choice, len(tokens)), (request, choice)
        for choice in range(0 if heard.cancelled else request.sampling.n):
            said, sampling = heard.tokens[choice], request.sampling
            stopped = len(said) > sampling.min_tokens and said[-1] in sampling.eos_token_ids
            assert stopped or len(said) == sampling.max_tokens
    run.close()
