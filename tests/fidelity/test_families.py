"""Random models of each family, alone and with adapters, against transformers + PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine_svc.types import NO_SLOT, SamplingParams
from tests.support.direct_runner import (
    WAY_OPTIONS,
    WAY_TOLERANCE,
    WAYS,
    DirectRunner,
    SeatedSequence,
)
from tests.support.oracle import Comparison, Oracle, pack, write_checkpoint, write_peft_adapter

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64, "beta_fast": 4.0,
}  # fmt: skip
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
#: served within its original context; the prompts and answers are shorter
LONG_ROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [2.0] * 6,
        "short_factor": [1.0, 1.1, 1.3, 1.2, 1.7, 2.5],
    },
}  # fmt: skip
PHI3: dict[str, Any] = {"pad_token_id": 2, "hidden_size": 48, "head_dim": 12}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied-sharded": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "max_shard_size": "40KB"},
    ),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": ("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE}),
    "llama-no-groups": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 9}),
    "llama-rope-yarn": ("LlamaForCausalLM", {"rope_parameters": YARN_ROPE}),
    "phi3": ("Phi3ForCausalLM", PHI3),
    "phi3-window": ("Phi3ForCausalLM", {**PHI3, "sliding_window": 9}),
    "phi3-partial-rotary": ("Phi3ForCausalLM", {**PHI3, "rope_parameters": PARTIAL_ROPE}),
    "phi3-longrope": ("Phi3ForCausalLM", {**PHI3, **LONG_ROPE}),
    "smollm3": ("SmolLM3ForCausalLM", {"pad_token_id": 2, "no_rope_layer_interval": 2}),
    "smollm3-tied": ("SmolLM3ForCausalLM", {"pad_token_id": 2, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 64, "head_dim": 16}),
    "qwen2-tied-yarn": (
        "Qwen2ForCausalLM",
        {
            "hidden_size": 64,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": YARN_ROPE,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 20}),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]


#: one of each kind of kernel choice: norms of heads, biases, a window and partial rotation
ON_A_GPU = ("llama-biases", "qwen3", "phi3-window", "phi3-partial-rotary", "smollm3-tied")


@pytest.fixture(params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    architecture, changes = FAMILIES[request.param]
    return write_checkpoint(tmp_path / "base", architecture, **dict(changes))


@pytest.mark.parametrize("way", WAYS)
def test_each_family_equals_transformers_and_peft_in_a_mixed_batch(
    model_dir: Path, tmp_path: Path, way: str, request: pytest.FixtureRequest
) -> None:
    if way == "cuda" and request.node.callspec.params["model_dir"] not in ON_A_GPU:
        pytest.skip("other kernels than these are not compiled for it")
    shapes = DirectRunner(model_dir, arena_bytes=1 << 22).loaded
    adapter = write_peft_adapter(
        model_dir, tmp_path / "a", seed=1, r=5, lora_alpha=12,
        target_modules=FUSED if shapes.base.fused_modules else ALL,
    )  # fmt: skip
    digest, num_pages, packed = pack(adapter, shapes.base, shapes.layout)
    run = DirectRunner(
        model_dir, {digest: packed}, arena_bytes=1 << 23, max_num_seqs=4, **WAY_OPTIONS[way]
    )
    run.record_logits()
    run.load_slot(1, digest, num_pages)
    prompts = [[7, 3, 99, 100, 5], list(range(2, 40)), [42], list(range(60, 79))]
    sequences = [
        SeatedSequence(seat, NO_SLOT if seat % 2 else 1, prompt, GREEDY)
        for seat, prompt in enumerate(prompts)
    ]
    run.generate(sequences, num_tokens=12)
    oracle, comparison = Oracle(model_dir, {"a": adapter}), Comparison()
    for sequence in sequences:
        name = None if sequence.slot == NO_SLOT else "a"
        comparison.check(oracle, name, sequence, sequence.logits, WAY_TOLERANCE[way])
    comparison.assert_few_close_calls()
    changed = oracle.logits(prompts[0], "a") - oracle.logits(prompts[0], None)
    assert changed.abs().max() > 100 * TOLERANCE, "the adapter must matter"
    run.close()
