"""Before serving a GPU runs every kind of step, whatever the limits are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_svc.types import NO_SLOT, LateInputs, SamplingParams, StepPlan
from kernels.rank_tokens import MAX_TOP
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.fake_graphs import FakeGraphs, use_fake_graphs, warm_up
from tests.support.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("warm_up") / "model")


class Engines:
    """Models with fake graphs, closed at the end."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._runs: list[DirectRunner] = []

    def load(self, seqs: int, tokens: int, **options: Any) -> DirectRunner:
        settings = {"arena_bytes": 1 << 22, "max_slots": 4, **options}
        run = DirectRunner(
            self._model_dir, static_buffers=True, max_num_seqs=seqs,
            max_num_batched_tokens=tokens, **settings,
        )  # fmt: skip
        self._runs.append(run)
        return run

    def close(self) -> None:
        for run in self._runs:
            run.close()


@pytest.fixture
def engines(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    use_fake_graphs(monkeypatch)
    engines = Engines(model_dir)
    yield engines
    engines.close()


@pytest.mark.parametrize(
    ("seqs", "tokens", "options"),
    [
        (1, 17, {}),
        (1, 600, {}),
        (2, 18, {"page_size": 512}),
        (5, 21, {"context_tokens": 2}),
        (5, 140, {"context_tokens": 17}),
        (3, 300, {"arena_bytes": 1 << 14}),
        (20, 36, {"max_slots": 1}),
    ],
)
def test_any_limits_are_warmed_up_and_leave_every_reachable_bucket_captured(
    engines: Engines, seqs: int, tokens: int, options: dict[str, Any]
) -> None:
    run = engines.load(seqs, tokens, **options)
    warm_up(run)
    inner: Any = run.runner
    steps, graphs = inner._stepper, inner._stepper._graphs
    assert isinstance(graphs, FakeGraphs)
    captured = {(key.rows, key.has_prompts, key.with_lora) for key in graphs.launches}
    longest = min(run.loaded.context_tokens, run.loaded.num_pages * run.loaded.page_size)
    reachable = [
        size
        for before, size in zip((0, *steps.mixed_buckets), steps.mixed_buckets, strict=False)
        if before < seqs * longest
    ]
    decodes = {(rows, False, lora) for rows in steps.decode_buckets for lora in (False, True)}
    assert captured == decodes | {(rows, True, True) for rows in reachable}


@pytest.mark.parametrize("seqs", [1, 2, 3, 7])
def test_an_engine_of_few_seats_has_sampled_in_every_way_too(
    engines: Engines, seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engines.load(seqs, seqs + 40)
    inner: Any = run.runner
    seen: set[str] = set()
    sample, draw = inner.sample, inner._sampler._sample

    def sampled(plan: StepPlan, late: LateInputs) -> None:
        ranked = [c.num_tokens for c in plan.chunks if c.prompt_logprobs == MAX_TOP]
        seen.update(f"{tokens} prompt tokens ranked" for tokens in ranked)
        for opening in plan.seat_openings:
            wish = opening.sampling
            seen.update(
                name
                for name, asked in {
                    "greedy": wish.temperature == 0,
                    "ranked": wish.logprobs is not None,
                    "penalised, long": wish.repetition_penalty != 1
                    and len(opening.prompt_token_ids) == run.loaded.context_tokens,
                    "biased": wish.logit_bias,
                    "banned": wish.min_tokens and wish.stop_token_ids,
                }.items()
                if asked
            )
        sample(plan, late)

    def drawn(logits: torch.Tensor, rows: Any) -> None:
        masked = "masked" if rows.token_masks is not None else "plain"
        seen.add(f"{masked}, cut" if rows.cut else masked)
        draw(logits, rows)

    monkeypatch.setattr(inner, "sample", sampled)
    monkeypatch.setattr(inner._sampler, "_sample", drawn)
    warm_up(run)
    assert seen == {
        "greedy", "ranked", "penalised, long", "biased", "banned",
        "plain", "plain, cut", "masked, cut", f"{seqs + 40} prompt tokens ranked",
    }  # fmt: skip


def test_an_adapter_with_a_vocabulary_of_its_own_has_been_served(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engines.load(3, 90)
    inner: Any = run.runner
    vocabulary = inner._vocabulary
    seen: set[str] = set()
    embed, grouped = vocabulary._embed, vocabulary._grouped

    def embedded(own: Any, ids: torch.Tensor, out: torch.Tensor) -> None:
        parts = {"weight": own.weight, "A": own.a, "B": own.expands, "head": own.head}
        seen.update(f"{name} of {len(ids)}" for name, part in parts.items() if part)
        embed(own, ids, out)

    monkeypatch.setattr(vocabulary, "_embed", embedded)
    monkeypatch.setattr(vocabulary, "_grouped", lambda *args: seen.add("head") or grouped(*args))
    warm_up(run)
    of_step = {f"{name} of {rows}" for name in ("weight", "A", "B", "head") for rows in (90, 3)}
    assert seen == of_step | {"head"}
    assert not any(vocabulary.brings(slot) for slot in range(4))


class Launched:
    """(rows, with prompts, with adapters) of every step that a trunk launches."""

    def __init__(self, run: DirectRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        inner: Any = run.runner
        trunk = inner._stepper._trunk
        self.shapes: set[tuple[int, bool, bool]] = set()
        self._launch = trunk.run
        monkeypatch.setattr(trunk, "run", self._launched)

    def _launched(self, step: Any, *others: Any) -> torch.Tensor:
        has_prompts, has_adapters = step.prefill_tiles is not None, step.adapters is not None
        self.shapes.add((len(step.token_ids), has_prompts, has_adapters))
        hidden: torch.Tensor = self._launch(step, *others)
        return hidden


def test_a_step_that_is_not_replayed_has_a_shape_that_was_warmed_up(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = engines.load(2, 1000)
    inner: Any = run.runner
    launched = Launched(run, monkeypatch)
    warm_up(run)
    warmed, replayed = set(launched.shapes), inner._stepper._graphs.replayed
    launched.shapes.clear()
    before = len(replayed)
    for rows in (901, 960, 998):
        sampling = SamplingParams(max_tokens=9, seed=0, temperature=0.0)
        long = SeatedSequence(0, NO_SLOT, [3] * rows, sampling)
        run.run([(long, rows)])
        run.release(long)
    assert len(replayed) == before
    assert launched.shapes == {(1000, True, False)}
    assert launched.shapes <= warmed


@pytest.mark.parametrize("tokens", [700, 1024, 1500])
def test_steps_with_and_without_adapters_are_launched_though_one_graph_serves_both(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Those with more prompts than a captured one has room for are not replayed."""
    run = engines.load(40, tokens, max_slots=1)
    inner: Any = run.runner
    launched = Launched(run, monkeypatch)
    warm_up(run)
    buckets = inner._stepper.mixed_buckets
    assert buckets
    assert {(rows, True, lora) for rows in buckets for lora in (False, True)} <= launched.shapes
