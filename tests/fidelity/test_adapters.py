"""What PEFT can write, one row each, in one mixed batch against PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_svc.types import NO_SLOT, SamplingParams
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.oracle import Comparison, Oracle, pack, write_checkpoint, write_peft_adapter

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]},
    "odd ranks above one block": {"r": 17, "lora_alpha": 9, "target_modules": ALL},
    "rank 33, rsLoRA": {
        "r": 33, "lora_alpha": 8, "use_rslora": True, "target_modules": ["v_proj", "down_proj"],
    },
    "rank and alpha patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": ALL,
        "rank_pattern": {"down_proj": 7, r"layers\.1\.self_attn\.q_proj": 2},
        "alpha_pattern": {"up_proj": 3, "k_proj": 20},
    },
    "all-linear": {"r": 3, "lora_alpha": 6, "target_modules": "all-linear"},
    "a regular expression": {
        "r": 6, "lora_alpha": 6, "target_modules": r".*\.(0|2)\.mlp\.(gate|up)_proj",
    },
    "some layers": {
        "r": 5, "lora_alpha": 20, "target_modules": ATTENTION, "layers_to_transform": [1],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "m", "LlamaForCausalLM", seed=4)


@pytest.fixture(scope="module")
def adapter_dirs(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: write_peft_adapter(model_dir, root / str(index), seed=index, **dict(config))
        for index, (name, config) in enumerate(ADAPTERS.items())
    }


def test_every_kind_of_adapter_and_the_base_share_a_batch_with_joins_and_leaves(
    model_dir: Path, adapter_dirs: dict[str, Path]
) -> None:
    shapes = DirectRunner(model_dir, arena_bytes=1 << 20).loaded
    packed = {name: pack(d, shapes.base, shapes.layout) for name, d in adapter_dirs.items()}
    run = DirectRunner(
        model_dir, {digest: data for digest, _, data in packed.values()},
        arena_bytes=1 << 24, max_num_seqs=16, max_slots=8,
    )  # fmt: skip
    run.record_logits()
    names = [*ADAPTERS, None]
    for slot, (digest, num_pages, _) in enumerate(packed.values()):
        run.load_slot(slot, digest, num_pages)
    sequences = [
        SeatedSequence(
            seat,
            seat if name else NO_SLOT,
            [(13 * seat + 5 * i) % 130 for i in range(3 + 4 * seat)],
            GREEDY,
        )
        for seat, name in enumerate(names)
    ]
    # joins: two new sequences at each turn of three tokens; leaves: at 11 tokens
    for joined in range(2, len(sequences) + 2, 2):
        run.generate([s for s in sequences[:joined] if len(s.outputs) < 9], joined + 3, chunk=6)
    run.generate(sequences, 11, chunk=6)
    oracle, comparison = Oracle(model_dir, adapter_dirs), Comparison()
    for name, sequence in zip(names, sequences, strict=True):
        comparison.check(oracle, name, sequence, sequence.logits, TOLERANCE)
        if name is not None:
            changed = oracle.logits(sequence.prompt, name) - oracle.logits(sequence.prompt, None)
            assert changed.abs().max() > 30 * TOLERANCE, f"{name} must matter"
    comparison.assert_few_close_calls()
    run.close()
