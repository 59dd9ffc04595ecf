"""A sequence's result does not depend on how it was batched, chunked, paused or forked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_svc.model.lora import KernelLora
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
    LateInputs,
    PageCopy,
    PromptLogprobs,
    SamplingParams,
    SeatOpening,
    StepPlan,
)
from tests.support.direct_runner import (
    WAY_OPTIONS,
    WAY_TOLERANCE,
    WAYS,
    DirectRunner,
    SeatedSequence,
)
from tests.support.oracle import Oracle, pack, write_checkpoint, write_peft_adapter

GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)
SAMPLED = SamplingParams(
    max_tokens=64, seed=11, temperature=0.9, top_p=0.95, repetition_penalty=1.1,
    frequency_penalty=0.3, logprobs=2,
)  # fmt: skip
PROMPT = [(7 * i) % 130 for i in range(41)]


@dataclass
class Setup:
    model_dir: Path
    adapter_dir: Path
    digest: str
    num_pages: int
    packed: bytes
    way: str = "eager"

    def runner(self, **options: Any) -> DirectRunner:
        settings = {
            "arena_bytes": 1 << 22, "max_num_seqs": 8, **WAY_OPTIONS[self.way], **options,
        }  # fmt: skip
        run = DirectRunner(self.model_dir, {self.digest: self.packed}, **settings)
        # nothing may lean on what fresh or freed memory holds
        run.loaded.runner._arena.bytes.fill_(0xFF)
        run.record_logits()
        run.load_slot(0, self.digest, self.num_pages)
        return run


@pytest.fixture(scope="module", params=WAYS)
def setup(request: pytest.FixtureRequest, base: Setup) -> Setup:
    return replace(base, way=request.param)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    root = tmp_path_factory.mktemp("batching")
    model_dir = write_checkpoint(root / "m", "Qwen3ForCausalLM", seed=2)
    adapter = write_peft_adapter(
        model_dir, root / "a", r=6, lora_alpha=12, target_modules="all-linear"
    )
    shapes = DirectRunner(model_dir, arena_bytes=1 << 20).loaded
    return Setup(model_dir, adapter, *pack(adapter, shapes.base, shapes.layout))


@pytest.fixture
def run(setup: Setup) -> Iterator[DirectRunner]:
    run = setup.runner()
    yield run
    run.close()


def alone(
    setup: Setup, sampling: SamplingParams, slot: int = 0, num_tokens: int = 12
) -> SeatedSequence:
    run = setup.runner()
    sequence = SeatedSequence(0, slot, list(PROMPT), sampling)
    run.generate([sequence], num_tokens)
    run.close()
    return sequence


def assert_same(setup: Setup, one: SeatedSequence, other: SeatedSequence) -> None:
    """Logits differ by rounding when shapes differ."""
    assert one.outputs == other.outputs
    difference = (torch.stack(one.logits) - torch.stack(other.logits)).abs().max()
    assert difference <= WAY_TOLERANCE[setup.way]


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 17, 40])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_chunk_sizes_do_not_change_the_result(
    setup: Setup, run: DirectRunner, chunk: int, sampling: SamplingParams
) -> None:
    sequence = SeatedSequence(3, 0, list(PROMPT), sampling)
    run.generate([sequence], 12, chunk=chunk)
    assert_same(setup, sequence, alone(setup, sampling))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_crowd_does_not_change_the_result(
    setup: Setup, run: DirectRunner, sampling: SamplingParams
) -> None:
    sequence = SeatedSequence(5, 0, list(PROMPT), sampling)
    crowd = [
        SeatedSequence(
            seat, NO_SLOT if seat % 2 else 0, PROMPT[: 3 + 9 * seat], SAMPLED, choice=seat
        )
        for seat in range(4)
    ]
    run.run([(crowd[0], 3), (crowd[1], 12)])
    run.generate([*crowd[:2], sequence], 5, chunk=9)
    run.generate([*crowd[2:], sequence], 12, chunk=9)
    assert_same(setup, sequence, alone(setup, sampling))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("after", [1, 6])
def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(
    setup: Setup, run: DirectRunner, sampling: SamplingParams, after: int
) -> None:
    sequence = SeatedSequence(2, 0, list(PROMPT), sampling)
    run.generate([sequence], after, chunk=30)
    run.release(sequence)
    other = SeatedSequence(2, NO_SLOT, [5, 6, 7], replace(SAMPLED, seed=1))
    run.generate([other], 20)
    sequence.seat = 7
    run.generate([sequence], 12, chunk=11)
    assert_same(setup, sequence, alone(setup, sampling))


def test_other_rows_content_changes_no_bit_at_equal_shape(setup: Setup) -> None:
    streams = []
    for content in (1, 50):
        run = setup.runner()
        mine = SeatedSequence(0, 0, list(PROMPT), SAMPLED)
        others = [
            SeatedSequence(1, 0, [(content * i) % 131 for i in range(1, 20)], SAMPLED),
            SeatedSequence(2, NO_SLOT, [(content + i) % 131 for i in range(33)], SAMPLED),
        ]
        run.generate([mine, *others], 10, chunk=15)
        assert others[0].outputs != mine.outputs
        streams.append((mine, others))
        run.close()
    (first, first_others), (second, second_others) = streams
    assert first_others[0].outputs != second_others[0].outputs
    assert first.outputs == second.outputs
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))
    assert first.samples == second.samples


def test_the_kernels_references_give_the_same_streams_as_the_cached_views(
    setup: Setup, run: DirectRunner
) -> None:
    if setup.way != "eager":
        pytest.skip("it has no views")
    inner: Any = run.runner
    kernels = KernelLora(
        inner._bindings._site_table, run.loaded.layout, max_tokens=512, num_slots=4
    )
    inner._model._lora = inner._model._vocabulary._lora = kernels
    sequence = SeatedSequence(0, 0, list(PROMPT), SAMPLED)
    base = SeatedSequence(1, NO_SLOT, list(PROMPT), SAMPLED)
    run.generate([sequence, base], 12, chunk=17)
    assert_same(setup, sequence, alone(setup, SAMPLED))
    assert_same(setup, base, alone(setup, SAMPLED, slot=NO_SLOT))


def test_run_ahead_feeds_the_token_that_is_not_collected_yet(
    setup: Setup, run: DirectRunner
) -> None:
    sequence = SeatedSequence(1, 0, list(PROMPT), SAMPLED)
    run.run([(sequence, len(PROMPT))])
    launched: list[StepPlan] = []
    for _ in range(11):
        # planned while the step before is not collected: the core knows no token of it
        plan, _ = run.plan([(sequence, 1)], None, run_ahead=1)
        run.runner.forward(plan)
        run.runner.sample(plan, LateInputs())
        launched.append(plan)
        if len(launched) > 1:
            result = run.runner.collect(launched.pop(0).step)
            sequence.outputs.append(result.samples[0].token_id)
    sequence.outputs.append(run.runner.collect(launched.pop().step).samples[0].token_id)
    assert sequence.outputs == alone(setup, SAMPLED).outputs


def test_choices_fork_from_one_prompt_with_a_copied_last_page(
    setup: Setup, run: DirectRunner
) -> None:
    size, prompt = run.loaded.page_size, list(PROMPT)
    assert len(prompt) % size, "the last page must be partial"
    pages = [run.free.pop() for _ in range(-(-len(prompt) // size))]
    openings = [SeatOpening(seat, SAMPLED, seat, tuple(prompt)) for seat in (0, 1)]
    prefill = Chunk(0, 0, 0, len(prompt), tuple(prompt), tuple(pages), (0, 1))
    run.step += 1
    plan = StepPlan(run.step, Chunks.of((prefill,)), tuple(openings), tuple(run._bindings))
    run.runner.forward(plan)
    run.runner.sample(plan, LateInputs())
    outputs = [[s.token_id] for s in run.runner.collect(plan.step).samples]
    tables = [pages, [*pages[:-1], run.free.pop()]]
    copies = (PageCopy(pages[-1], tables[1][-1]),)
    for position in range(len(prompt), len(prompt) + 8):
        for table in tables:
            if len(table) * size <= position:
                table.append(run.free.pop())
        chunks = Chunks.of(
            Chunk(seat, 0, position, 1, (), tuple(tables[seat]), (seat,)) for seat in (0, 1)
        )
        run.step += 1
        plan = StepPlan(run.step, chunks, page_copies=copies)
        copies = ()
        run.runner.forward(plan)
        run.runner.sample(plan, LateInputs())
        for sample in run.runner.collect(plan.step).samples:
            outputs[sample.seat].append(sample.token_id)
    assert outputs[0] != outputs[1]
    for choice in (0, 1):
        other = setup.runner()
        sequence = SeatedSequence(4, 0, prompt, SAMPLED, choice=choice)
        other.generate([sequence], 9)
        assert outputs[choice] == sequence.outputs
        other.close()


@pytest.mark.parametrize("chunk", [41, 9])
def test_prompt_and_sample_log_probabilities_are_the_models(
    setup: Setup, run: DirectRunner, chunk: int
) -> None:
    oracle = Oracle(setup.model_dir, {"a": setup.adapter_dir})
    expected = torch.log_softmax(oracle.logits(PROMPT, "a"), dim=1)
    sequence = SeatedSequence(0, 0, list(PROMPT), SAMPLED)
    found: list[PromptLogprobs] = []
    while sequence.computed < len(PROMPT):
        todo = min(chunk, len(PROMPT) - sequence.computed)
        found.extend(run.run([(sequence, todo)], prompt_logprobs=3).prompt_logprobs)
    positions = [p.first_position + i for p in found for i in range(len(p.tokens))]
    assert positions == list(range(1, len(PROMPT)))
    for position, token in zip(positions, (t for p in found for t in p.tokens), strict=True):
        row = expected[position - 1]
        assert token.token_id == PROMPT[position]
        assert token.logprob == pytest.approx(
            float(row[token.token_id]), abs=WAY_TOLERANCE[setup.way]
        )
        assert [v for _, v in token.top] == pytest.approx(
            row.topk(3).values.tolist(), abs=WAY_TOLERANCE[setup.way]
        )
    sample = sequence.samples[0]
    assert sample.logprobs is not None
    assert sample.logprobs.logprob == pytest.approx(
        float(expected[-1, sample.token_id]), abs=WAY_TOLERANCE[setup.way]
    )
    assert len(sample.logprobs.top) == 2


def test_a_slot_without_an_adapter_is_never_answered_by_the_base(run: DirectRunner) -> None:
    sequence = SeatedSequence(0, 2, [1, 2, 3], GREEDY)
    with pytest.raises(AssertionError, match="slot 2 holds no adapter"):
        run.run([(sequence, 3)])
