"""A captured step serves later ones: other sequences, other adapters, other pages.

On a CPU a "graph" is the launches themselves, see tests/support/fake_graphs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_svc.model.gpu import site_deltas, step_shapes
from engine_svc.types import NO_SLOT, LateInputs, SamplingParams, StepPlan
from tests.support.direct_runner import WAY_OPTIONS, WAY_TOLERANCE, DirectRunner, SeatedSequence
from tests.support.fake_graphs import FakeGraphs, use_fake_graphs, warm_up
from tests.support.oracle import Comparison, Oracle, pack, write_checkpoint, write_peft_adapter

GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)
#: an adapter of all linears, one of a few, one with gains and constants
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 9, "target_modules": "all-linear"},
    "few": {"r": 33, "target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]},
    "DoRA and biases": {"r": 4, "target_modules": "all-linear", "use_dora": True, "bias": "all"},
}
MAX_ROWS, MAX_NUM_SEQS = 700, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp("replay")
    folder = write_checkpoint(root / "m", "Qwen2ForCausalLM", seed=8)
    adapters = {
        name: write_peft_adapter(folder, root / str(seed), seed=seed, lora_alpha=16, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    return folder, adapters


#: "cuda, plain": neither graphs nor dependent launches; what fails there is a kernel's
PLAIN = "cuda, plain"


@pytest.fixture(
    params=[
        "static",
        *(pytest.param(way, marks=pytest.mark.gpu) for way in ("cuda", PLAIN)),
    ]
)
def run(
    request: pytest.FixtureRequest,
    model: tuple[Path, dict[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[DirectRunner]:
    folder, adapters = model
    options: dict[str, Any] = {
        "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": MAX_ROWS, "arena_bytes": 1 << 24,
        # the last page is not full
        "context_tokens": 250, "max_lora_rank": 64, **WAY_OPTIONS[request.param.split(",")[0]],
    }  # fmt: skip
    if request.param == PLAIN:
        options |= {"enforce_eager": True, "dependent_launches": False}
    if request.param == "static":
        use_fake_graphs(monkeypatch)
    shapes = DirectRunner(folder, arena_bytes=1 << 20)
    packed = [pack(path, shapes.loaded.base, shapes.loaded.layout) for path in adapters.values()]
    run = DirectRunner(folder, {digest: data for digest, _, data in packed}, **options)
    if request.param == "static":
        warm_up(run)
    run.record_logits()
    for slot, (digest, num_pages, _) in enumerate(packed):
        run.load_slot(slot, digest, num_pages)
    yield run
    run.close()


def test_every_bucket_is_captured_and_decodes_without_adapters_too(run: DirectRunner) -> None:
    found: Any = run.runner
    steps = found._stepper
    if not steps.num_graphs:
        pytest.skip("it has no graphs")
    assert steps.decode_buckets == (1, 2, 4, 8, 12)
    assert steps.mixed_buckets == (128, 256, 384, 512, 640)
    assert steps.long_buckets == (640,)
    assert steps.num_graphs == 2 * 5 + 5 + 1


def test_replays_follow_adapters_prompts_and_pages_as_they_change(
    run: DirectRunner, model: tuple[Path, dict[str, Path]]
) -> None:
    folder, adapters = model
    slots = [0, 1, 2, NO_SLOT, NO_SLOT, 2, 0, 1, 1, 0]
    everyone = [
        SeatedSequence(seat, slot, [(11 * seat + 3 * i) % 130 for i in range(2 + 3 * seat)], GREEDY)
        for seat, slot in enumerate(slots)
    ]
    # each round another mix decodes, and a prompt comes in beside it
    for joined in range(1, len(everyone) + 1):
        run.generate(everyone[joined - 1 : joined], 1)
        mix = [one for at, one in enumerate(everyone[:joined]) if (at + joined) % 3]
        for _ in range(2):
            run.run([(one, 1) for one in mix])
        if joined < len(everyone):
            coming = everyone[joined]
            run.run([*((one, 1) for one in mix), (coming, len(coming.prompt))])
    oracles = [Oracle(folder, {"it": path}) for path in adapters.values()]
    plain, comparison = Oracle(folder), Comparison()
    for one in everyone:
        oracle, name = (plain, None) if one.slot == NO_SLOT else (oracles[one.slot], "it")
        comparison.check(oracle, name, one, one.logits, WAY_TOLERANCE[run.loaded.device])
    comparison.assert_few_close_calls()


def test_a_step_with_more_prompts_than_a_captured_one_takes_is_launched(
    run: DirectRunner, model: tuple[Path, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = model
    everyone = [
        SeatedSequence(seat, NO_SLOT, [(7 * seat + i) % 130 for i in range(2 + seat)], GREEDY)
        for seat in range(8)
    ]
    runner: Any = run.runner
    graphs = runner._stepper._graphs
    counts = [_replays(graphs)]
    run.run([(one, len(one.prompt)) for one in everyone])
    counts.append(_replays(graphs))
    monkeypatch.setattr(step_shapes, "CAPTURED_PROMPTS", 0)
    for one in everyone:
        run.release(one)
        one.outputs.clear()
        one.samples.clear()
        one.logits.clear()
    run.run([(one, len(one.prompt)) for one in everyone])
    counts.append(_replays(graphs))
    if isinstance(graphs, FakeGraphs):
        assert counts == [counts[0], counts[0] + 1, counts[0] + 1]
    oracle, comparison = Oracle(folder), Comparison()
    for one in everyone:
        comparison.check(oracle, None, one, one.logits, WAY_TOLERANCE[run.loaded.device])
    comparison.assert_few_close_calls()


@pytest.mark.parametrize("short", [True, False])
def test_many_rows_are_replayed_with_short_and_with_long_work_items(
    run: DirectRunner,
    model: tuple[Path, dict[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
    short: bool,
) -> None:
    folder, adapters = model
    everyone = [
        SeatedSequence(seat, slot, [(7 * seat + i) % 130 for i in range(190 + seat)], GREEDY)
        for seat, slot in enumerate((0, NO_SLOT, 2))
    ]
    monkeypatch.setattr(site_deltas, "LONG_START", 1000 if short else 0)
    monkeypatch.setattr(site_deltas, "LONG_ITEM", 0)
    runner: Any = run.runner
    graphs = runner._stepper._graphs
    before = _replays(graphs)
    run.run([(one, len(one.prompt)) for one in everyone])
    if isinstance(graphs, FakeGraphs):
        (key,) = graphs.replayed[before:]
        assert (key.rows, key.long_items) == (640, not short)
    comparison = Comparison()
    for one in everyone:
        path = None if one.slot == NO_SLOT else list(adapters.values())[one.slot]
        oracle = Oracle(folder, {} if path is None else {"it": path})
        name = None if path is None else "it"
        comparison.check(oracle, name, one, one.logits, WAY_TOLERANCE[run.loaded.device])
    comparison.assert_few_close_calls()


def _replays(graphs: object) -> int:
    return len(graphs.replayed) if isinstance(graphs, FakeGraphs) else 0


def test_steps_in_flight_read_the_tokens_of_the_step_before_on_the_device(
    run: DirectRunner,
) -> None:
    def sequences() -> list[SeatedSequence]:
        prompts = [[7, 8, 9], [4] * 11, [100, 3], [5, 5]]
        return [SeatedSequence(s, s - 1, prompt, GREEDY) for s, prompt in enumerate(prompts)]

    expected = sequences()
    run.generate(expected, 12)
    for one in expected:
        run.release(one)
    ahead = sequences()
    run.run([(one, len(one.prompt)) for one in ahead])
    launched: list[tuple[StepPlan, list[SeatedSequence]]] = []
    for _ in range(11):
        plan, _ = run.plan([(one, 1) for one in ahead], None, run_ahead=1)
        run.runner.forward(plan)
        run.runner.sample(plan, LateInputs())
        launched.append((plan, ahead))
        if len(launched) > 1:
            _take(run, launched.pop(0))
    _take(run, launched.pop(0))
    assert [one.outputs for one in ahead] == [one.outputs for one in expected]


def _take(run: DirectRunner, launched: tuple[StepPlan, list[SeatedSequence]]) -> None:
    plan, sequences = launched
    by_seat = {one.seat: one for one in sequences}
    for sample in run.runner.collect(plan.step).samples:
        by_seat[sample.seat].outputs.append(sample.token_id)


#: sampled in every way that takes memory of its own
WISHES = (
    GREEDY,
    SamplingParams(max_tokens=64, seed=1, temperature=0.8, top_p=0.9, top_k=20, logprobs=5),
    SamplingParams(
        max_tokens=64, seed=2, temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3,
        presence_penalty=0.1, min_tokens=2, stop_token_ids=(3,), logit_bias=((5, 2.0),),
    ),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", ["all", "DoRA and biases"])
def test_serving_allocates_nothing_on_the_device(
    model: tuple[Path, dict[str, Path]], adapter: str
) -> None:
    folder, adapters = model
    shapes = DirectRunner(folder, arena_bytes=1 << 20)
    digest, num_pages, packed = pack(
        adapters[adapter], shapes.loaded.base, shapes.loaded.layout
    )  # fmt: skip
    run = DirectRunner(
        folder, {digest: packed}, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=1024,
        arena_bytes=1 << 24, **WAY_OPTIONS["cuda"],
    )  # fmt: skip
    runner: Any = run.runner
    assert runner.num_serving_allocations == 0
    run.load_slot(0, digest, num_pages)
    longest = run.loaded.context_tokens - 65
    # fresh prompts short and long, with penalties, cuts and log probabilities, on both paths
    everyone = [
        SeatedSequence(
            seat, seat % 2 - 1, [seat + 1] * min(4 + 90 * seat, longest), WISHES[seat % 3]
        )
        for seat in range(9)
    ]
    for one in everyone:
        run.run([(one, len(one.prompt))], prompt_logprobs=3 if one.seat == 4 else None)
    run.generate(everyone, 40)
    assert runner.num_serving_allocations == 0
    for one in everyone[:3]:
        run.release(one)
    # another binding, and sequences that come back with all they have said
    run.load_slot(1, digest, num_pages)
    run.run([(one, len(one.tokens)) for one in everyone[:3]])
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(20):
        run.run([(one, 1) for one in everyone])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert runner.num_serving_allocations == 0
    run.close()
