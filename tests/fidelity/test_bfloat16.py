"""Adapters alone in bf16, no further from fp32 than PEFT: gains and constants, where B is g ⊙ B
rounded once more, embeddings and output head. The rule: tests/support/bfloat16.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_svc.types import SamplingParams
from tests.support.bfloat16 import (
    load_narrow,
    logits,
    misses,
    options_of,
    recorded,
    round_weights,
    too_small,
    with_adapter,
)
from tests.support.direct_runner import WAYS, DirectRunner, SeatedSequence
from tests.support.oracle import load_base, pack, write_checkpoint, write_peft_adapter

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PROMPT = [(7 * i + 3) % 131 for i in range(30)]
NUM_TOKENS = 50
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "DoRA and biases": {"use_dora": True, "bias": "all"},
    "biases": {"lora_bias": True, "bias": "lora_only"},
    "vocabulary": {"target_modules": ["q_proj", "up_proj", "embed_tokens", "lm_head"]},
    "whole embeddings and head": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "m"
    write_checkpoint(folder, "Qwen2ForCausalLM", seed=3, initializer_range=0.15)
    round_weights(folder / "model.safetensors")
    return folder


def ours(model_dir: Path, adapter: Path, way: str) -> SeatedSequence:
    """A stream that we sampled, with its logits."""
    empty = DirectRunner(model_dir, arena_bytes=1 << 20, **options_of(way))
    digest, num_pages, packed = pack(adapter, empty.loaded.base, empty.loaded.layout)
    empty.close()
    run = DirectRunner(model_dir, {digest: packed}, arena_bytes=1 << 22, **options_of(way))
    run.record_logits()
    run.load_slot(0, digest, num_pages)
    sequence = SeatedSequence(0, 0, PROMPT, SamplingParams(max_tokens=999, seed=0))
    run.generate([sequence], NUM_TOKENS)
    run.close()
    return sequence


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_distance_from_fp32_is_no_larger_than_pefts(
    model_dir: Path, tmp_path: Path, case: str, way: str
) -> None:
    config = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **CASES[case]}
    adapter = write_peft_adapter(model_dir, tmp_path / "a", seed=5, **config)
    round_weights(adapter / "adapter_model.safetensors")
    sequence = ours(model_dir, adapter, way)
    base = load_base(model_dir)
    exact = logits(with_adapter(base, adapter), [sequence])
    narrow = with_adapter(load_narrow(model_dir, way), adapter)
    error = recorded([sequence]) - exact
    assert not misses(error, logits(narrow, [sequence]) - exact)
    assert not too_small(exact - logits(base, [sequence]), error)
