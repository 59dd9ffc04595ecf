"""64 adapters of mixed ranks in bf16: one batch of all equals 64 runs of one, and both are no
further from fp32 than PEFT. The rule: tests/support/bfloat16.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine_svc.types import SamplingParams
from loraplex.base_model import BaseModelSpec
from tests.support.bfloat16 import (
    LARGE_WAYS,
    load_narrow,
    logits,
    misses,
    options_of,
    recorded,
    report,
    round_weights,
    too_small,
    with_adapter,
)
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.oracle import load_base, pack, write_checkpoint
from tests.support.tiny_adapters import adapter_tensors, write_adapter

NUM_ADAPTERS = 64
#: see test_bfloat16_rows.py
SHARPNESS = 0.12
RANKS = (4, 8, 17, 24)
MODULES = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Crowd:
    model_dir: Path
    adapters: list[Path]
    packed: list[tuple[str, int, bytes]]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Crowd:
    root = tmp_path_factory.mktemp("crowd")
    model_dir = write_checkpoint(
        root / "m", "LlamaForCausalLM", seed=9, num_hidden_layers=2, initializer_range=SHARPNESS
    )
    round_weights(model_dir / "model.safetensors")
    run = DirectRunner(model_dir, arena_bytes=1 << 20, **options_of("eager"))
    shapes = run.loaded
    run.close()
    adapters = [adapter(root / str(number), number, shapes.base) for number in range(NUM_ADAPTERS)]
    packed = [pack(folder, shapes.base, shapes.layout) for folder in adapters]
    return Crowd(model_dir, adapters, packed)


def adapter(folder: Path, number: int, base: BaseModelSpec) -> Path:
    rank = RANKS[number % len(RANKS)]
    tensors = adapter_tensors(base, MODULES, rank=rank, seed=number)
    return write_adapter(
        folder,
        tensors={name: tensor * 0.1 for name, tensor in tensors.items()},
        dtype="BF16",
        config={"r": rank, "lora_alpha": 2 * rank, "target_modules": list(MODULES)},
    )


def generate(
    crowd: Crowd, way: str, num_tokens: int
) -> tuple[list[SeatedSequence], list[SeatedSequence]]:
    """A sequence an adapter, all in one batch; and each again in steps of its own, which sample
    what the batch sampled."""
    run = DirectRunner(
        crowd.model_dir, {digest: data for digest, _, data in crowd.packed},
        arena_bytes=1 << 24, max_num_seqs=NUM_ADAPTERS, max_slots=NUM_ADAPTERS, **options_of(way),
    )  # fmt: skip
    run.record_logits()
    for slot, (digest, num_pages, _) in enumerate(crowd.packed):
        run.load_slot(slot, digest, num_pages)
    together = [
        SeatedSequence(
            number,
            number,
            [(13 * number + 5 * i) % 130 for i in range(3 + number % 9)],
            SamplingParams(max_tokens=999, seed=number),
        )
        for number in range(NUM_ADAPTERS)
    ]
    run.generate(together, num_tokens, chunk=2)
    alone = [SeatedSequence(0, one.slot, one.prompt, one.sampling) for one in together]
    for one, like in zip(alone, together, strict=True):
        run.follow(one, like.outputs)
        run.release(one)
    run.close()
    return together, alone


@pytest.mark.parametrize("way", LARGE_WAYS)
@pytest.mark.parametrize(
    ("num_tokens", "num_held_together"),
    [
        # the 99.9th percentile of 32 tokens is that of their 4 largest numbers: adapters of one
        # rank are held to the rule together
        pytest.param(32, NUM_ADAPTERS // len(RANKS), id="by rank"),
        pytest.param(96, 1, id="by adapter", marks=pytest.mark.slow),
    ],
)
def test_a_batch_of_64_adapters_equals_64_single_runs(
    crowd: Crowd, way: str, num_tokens: int, num_held_together: int
) -> None:
    base, narrow = load_base(crowd.model_dir), load_narrow(crowd.model_dir, way)
    errors: dict[int, list[tuple[torch.Tensor, ...]]] = {}
    failed: dict[str, list[str]] = {}
    for number, (one, single) in enumerate(zip(*generate(crowd, way, num_tokens), strict=True)):
        exact = logits(with_adapter(base, crowd.adapters[number]), [one])
        yardstick = logits(with_adapter(narrow, crowd.adapters[number]), [one]) - exact
        batched, alone = recorded([one]) - exact, recorded([single]) - exact
        failed[f"adapter {number}"] = [
            *misses(batched - alone, yardstick),
            *too_small(exact - logits(base, [one]), batched),
        ]
        group = number if num_held_together == 1 else RANKS[number % len(RANKS)]
        errors.setdefault(group, []).append((batched, alone, yardstick))
    for group, found in errors.items():
        assert len(found) == num_held_together
        batched, alone, yardstick = (torch.cat(part) for part in zip(*found, strict=True))
        failed[f"batch, {group}"] = misses(batched, yardstick)
        failed[f"alone, {group}"] = misses(alone, yardstick)
    assert not report(failed), report(failed)
