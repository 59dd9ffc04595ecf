"""Adapters on embeddings and output head, with tied and untied bases, against PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_svc.model import vocabulary
from engine_svc.model.lora import KernelLora
from engine_svc.model.vocabulary import _Table
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
    LateInputs,
    PromptLogprobs,
    SamplingParams,
    SeatOpening,
    StepPlan,
)
from tests.support.coverage import VOCABULARY
from tests.support.direct_runner import (
    WAY_OPTIONS,
    WAY_TOLERANCE,
    WAYS,
    DirectRunner,
    SeatedSequence,
)
from tests.support.oracle import Comparison, Oracle, pack, write_checkpoint, write_peft_adapter

#: what PEFT says of the copies that it saves, and of adapters on tied weights
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)
ADAPTERS = {case.name: case for case in VOCABULARY}
ONE = "a"
HEAD_LORA = "target_modules: both sides of the vocabulary, rsLoRA and patterns"
SAVED_HEAD = "modules_to_save: lm_head, with LoRA on embed_tokens"


@dataclass
class Setup:
    model_dir: Path
    adapters: dict[str, Path]
    packed: dict[str, tuple[str, int, bytes]]
    way: str = "eager"

    def runner(self, **options: Any) -> DirectRunner:
        """All adapters in slots, in order; memory holds garbage before."""
        files = {digest: data for digest, _, data in self.packed.values()}
        settings = {
            "arena_bytes": 1 << 23, "max_num_seqs": 32, "max_slots": 16, **WAY_OPTIONS[self.way],
            **options,
        }  # fmt: skip
        run = DirectRunner(self.model_dir, files, **settings)
        run.loaded.runner._arena.bytes.fill_(0xFF)
        run.record_logits()
        for slot, (digest, num_pages, _) in enumerate(self.packed.values()):
            run.load_slot(slot, digest, num_pages)
        return run

    def oracle(self, name: str | None) -> Oracle:
        """A model of its own: PEFT cannot hold a saved module and a LoRA of one module at once."""
        return Oracle(self.model_dir, {} if name is None else {ONE: self.adapters[name]})

    def slot(self, name: str | None) -> int:
        return NO_SLOT if name is None else list(self.packed).index(name)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    root = tmp_path_factory.mktemp("vocabulary")
    model_dir = write_checkpoint(
        root / "m", "LlamaForCausalLM", seed=7, tie_word_embeddings=request.param
    )
    adapters = {
        name: write_peft_adapter(
            model_dir,
            root / str(index),
            seed=index,
            save_embedding_layers="auto" if case.copies else False,
            **dict(case.config),
        )
        for index, (name, case) in enumerate(ADAPTERS.items())
    }
    shapes = DirectRunner(model_dir, arena_bytes=1 << 20).loaded
    packed = {name: pack(path, shapes.base, shapes.layout) for name, path in adapters.items()}
    return Setup(model_dir, adapters, packed)


@pytest.fixture(scope="module", params=WAYS)
def setup(request: pytest.FixtureRequest, base: Setup) -> Setup:
    return replace(base, way=request.param)


@pytest.fixture
def run(setup: Setup) -> Iterator[DirectRunner]:
    run = setup.runner()
    yield run
    run.close()


def sequences(setup: Setup, each: int = 1) -> list[tuple[str | None, SeatedSequence]]:
    names = [name for name in [*ADAPTERS, None] for _ in range(each)]
    return [
        (
            name,
            SeatedSequence(
                seat,
                setup.slot(name),
                [(13 * seat + 5 * i) % 130 for i in range(3 + 2 * seat)],
                GREEDY,
            ),
        )
        for seat, name in enumerate(names)
    ]


def check(setup: Setup, pairs: list[tuple[str | None, SeatedSequence]]) -> None:
    comparison = Comparison()
    for name, sequence in pairs:
        oracle = setup.oracle(name)
        served = None if name is None else ONE
        comparison.check(oracle, served, sequence, sequence.logits, WAY_TOLERANCE[setup.way])
        if name is not None:
            changed = oracle.logits(sequence.prompt, ONE) - oracle.logits(sequence.prompt, None)
            assert changed.abs().max() > 30 * TOLERANCE, f"{name} must matter"
    comparison.assert_few_close_calls()


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_alone_equals_peft(setup: Setup, run: DirectRunner, name: str) -> None:
    sequence = SeatedSequence(0, setup.slot(name), [9, 8, 7, 6, 5, 120], GREEDY)
    run.generate([sequence], 12)
    check(setup, [(name, sequence)])


def test_all_share_a_batch_with_joins_and_leaves(setup: Setup, run: DirectRunner) -> None:
    pairs = sequences(setup, each=2)
    everyone = [sequence for _, sequence in pairs]
    for joined in range(4, len(everyone) + 4, 4):
        some = [one for one in everyone[:joined] if len(one.outputs) < 8]
        run.generate(some, joined // 2 + 2, chunk=6)
    run.generate(everyone, 11, chunk=6)
    check(setup, pairs)


def test_a_long_prompts_tokens_are_looked_up_in_blocks_that_bound_the_memory(
    setup: Setup, run: DirectRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    rows = _Table.rows

    def counted(table: _Table, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        looked_up.append(len(ids))
        return rows(table, numbers, ids)

    monkeypatch.setattr(vocabulary, "EMBED_ROWS", 4)
    monkeypatch.setattr(_Table, "rows", counted)
    pairs = sequences(setup)
    run.generate([sequence for _, sequence in pairs], 2)
    assert max(looked_up) == 4
    check(setup, pairs)


def test_the_kernels_references_serve_the_head_like_the_cached_views(
    setup: Setup, run: DirectRunner
) -> None:
    if setup.way != "eager":
        pytest.skip("it has no views")
    inner: Any = run.runner
    kernels = KernelLora(
        inner._bindings._site_table, run.loaded.layout, max_tokens=512, num_slots=16
    )
    inner._model._lora = inner._model._vocabulary._lora = kernels
    pairs = sequences(setup)
    run.generate([sequence for _, sequence in pairs], 6)
    check(setup, pairs)


def test_prompt_log_probabilities_come_from_the_adapters_own_head(
    setup: Setup, run: DirectRunner
) -> None:
    prompt = [(7 * i) % 130 for i in range(41)]
    for name in (SAVED_HEAD, HEAD_LORA):
        sequence = SeatedSequence(setup.slot(name), setup.slot(name), prompt, GREEDY)
        found: list[PromptLogprobs] = []
        while sequence.computed < len(prompt):
            todo = min(18, len(prompt) - sequence.computed)
            found.extend(run.run([(sequence, todo)], prompt_logprobs=0).prompt_logprobs)
        expected = torch.log_softmax(setup.oracle(name).logits(prompt, ONE), dim=1)
        ours = [token.logprob for part in found for token in part.tokens]
        theirs = [float(expected[at, token]) for at, token in enumerate(prompt[1:])]
        assert ours == pytest.approx(theirs, abs=WAY_TOLERANCE[setup.way])


def test_choices_of_one_prompt_sample_from_the_adapters_own_head(
    setup: Setup, run: DirectRunner
) -> None:
    prompt, name = [5, 6, 7, 8, 9], SAVED_HEAD
    sampling = SamplingParams(max_tokens=8, seed=3, logprobs=0)
    page = (run.free.pop(),)
    chunk = Chunk(0, setup.slot(name), 0, 5, tuple(prompt), page, (0, 1, 2))
    openings = tuple(SeatOpening(seat, sampling, seat, tuple(prompt)) for seat in range(3))
    base = Chunk(3, NO_SLOT, 0, 5, tuple(prompt), (run.free.pop(),), (3,))
    openings += (SeatOpening(3, sampling, 0, tuple(prompt)),)
    plan = StepPlan(1, Chunks.of((chunk, base)), openings, tuple(run._bindings))
    run.runner.forward(plan)
    run.runner.sample(plan, LateInputs())
    samples = run.runner.collect(1).samples
    for sample in samples:
        served_by = None if sample.seat == 3 else name
        row = setup.oracle(served_by).logits(prompt, served_by and ONE)[-1]
        expected = float(torch.log_softmax(row, dim=0)[sample.token_id])
        assert sample.logprobs is not None
        assert sample.logprobs.logprob == pytest.approx(expected, abs=WAY_TOLERANCE[setup.way])


def test_a_changed_copy_of_the_base_counts_on_both_sides_of_a_tied_base(
    setup: Setup, tmp_path: Path
) -> None:
    """PEFT loads the copy into the base's own parameter."""
    for index, module in enumerate(("lm_head", "embed_tokens")):
        folder = write_peft_adapter(
            setup.model_dir, tmp_path / module, seed=index, r=4, target_modules=[module, "q_proj"]
        )
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        copy = next(name for name in tensors if name.endswith("base_layer.weight"))
        tensors[copy] = tensors[copy] + torch.randn_like(tensors[copy]) * 0.05
        save_file(tensors, file, metadata={"format": "pt"})
        shapes = DirectRunner(setup.model_dir, arena_bytes=1 << 20).loaded
        digest, num_pages, packed = pack(folder, shapes.base, shapes.layout)
        run = DirectRunner(setup.model_dir, {digest: packed}, arena_bytes=1 << 22)
        run.record_logits()
        run.load_slot(0, digest, num_pages)
        sequence = SeatedSequence(0, 0, [1, 2, 3, 4], GREEDY)
        run.generate([sequence], 8)
        oracle, comparison = Oracle(setup.model_dir, {"a": folder}), Comparison()
        comparison.check(oracle, "a", sequence, sequence.logits, TOLERANCE)
        run.close()
