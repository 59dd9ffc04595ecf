"""Runs whole models the GPU's way with Triton's interpreter in place of a GPU; prints for each
sequence how far its logits are from transformers + PEFT, as JSON.

    TRITON_INTERPRET=1 python tests/kernel/interpreted_model.py Qwen2ForCausalLM

Prompts in chunks beside decodes; adapters of some and of all linears, gains and constants; greedy
and drawn tokens. A process of its own, as test_interpreter.py says.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from engine_svc.model.gpu import build, launches, page_table, sampler, site_deltas, trunk
from engine_svc.types import NO_SLOT, SamplingParams
from kernels.add_rms_norm_triton import add_rms_norm_triton
from kernels.attention_tuning import most_parts
from kernels.decode_attention import DecodeScratch
from kernels.decode_attention_triton import decode_attention_triton
from kernels.embed_rows_triton import embed_rows_triton
from kernels.lora_delta_triton import lora_delta_triton
from kernels.lora_shrink_triton import lora_shrink_triton
from kernels.prefill_attention_triton import prefill_attention_triton
from kernels.rank_tokens_triton import rank_tokens_triton
from kernels.rope_store_triton import rope_store_triton
from kernels.sample_triton import sample_triton
from kernels.scatter_pages_triton import scatter_pages_triton
from kernels.silu_mul_delta_triton import silu_mul_delta_triton
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.oracle import Oracle, pack, write_checkpoint, write_peft_adapter

#: changes to TINY; two layers, so that one is the last and one is not
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 20},
    "MistralForCausalLM": {"sliding_window": 9},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 9, "target_modules": "all-linear"},
    "few": {"r": 17, "target_modules": ["v_proj", "down_proj"], "layers_to_transform": [1]},
    "DoRA": {"r": 4, "target_modules": "all-linear", "use_dora": True, "bias": "all"},
}
PROMPTS = [[7, 3, 99, 100, 5], list(range(2, 22)), [42], list(range(60, 79)), [9, 9]]
SLOTS = [0, 1, 2, NO_SLOT, 1]


def interpret() -> None:
    """Triton instead of the references, wherever the GPU's way calls them."""
    swaps: list[tuple[Any, Any]] = [
        (launches, add_rms_norm_triton),
        (launches, decode_attention_triton),
        (launches, rope_store_triton),
        (launches, silu_mul_delta_triton),
        (trunk, decode_attention_triton),
        (trunk, prefill_attention_triton),
        (trunk, embed_rows_triton),
        (trunk, scatter_pages_triton),
        (page_table, scatter_pages_triton),
        (site_deltas, lora_shrink_triton),
        (site_deltas, lora_delta_triton),
        (sampler, sample_triton),
        (sampler, rank_tokens_triton),
    ]
    for module, function in swaps:
        name = function.__name__.removesuffix("_triton")
        assert hasattr(module, name), (module, name)
        setattr(module, name, function)
    build.decode_scratch = scratch  # type: ignore[assignment]


def scratch(
    max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> DecodeScratch:
    """As a GPU gets it."""
    parts = most_parts(max_rows, num_kv_heads)
    return DecodeScratch(
        torch.empty(parts * num_heads * head_dim),
        torch.empty(parts * num_heads),
        torch.zeros(max_rows * num_kv_heads, dtype=torch.int32),
    )


def main(architecture: str, root: Path) -> None:
    folder = write_checkpoint(
        root / "m", architecture, seed=8, num_hidden_layers=2, **MODELS[architecture]
    )
    adapters = [
        write_peft_adapter(folder, root / name, seed=seed, lora_alpha=16, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    ]
    shapes = DirectRunner(folder, arena_bytes=1 << 20).loaded
    packed = [pack(path, shapes.base, shapes.layout) for path in adapters]
    interpret()
    run = DirectRunner(
        folder, {digest: data for digest, _, data in packed}, arena_bytes=1 << 22, max_num_seqs=6,
        max_num_batched_tokens=64, static_buffers=True, max_lora_rank=32,
    )  # fmt: skip
    inner: Any = run.runner
    inner._arena.bytes.fill_(0xFF)
    run.record_logits()
    for slot, (digest, num_pages, _) in enumerate(packed):
        run.load_slot(slot, digest, num_pages)
    everyone = [
        SeatedSequence(seat, slot, prompt, sampling(seat))
        for seat, (slot, prompt) in enumerate(zip(SLOTS, PROMPTS, strict=True))
    ]
    run.generate(everyone[:3], 2, chunk=8)
    run.generate(everyone, 4, chunk=16)
    for one in everyone:
        path = None if one.slot == NO_SLOT else adapters[one.slot]
        oracle = Oracle(folder, {} if path is None else {"it": path})
        logits = oracle.logits(one.tokens[:-1], None if path is None else "it")
        difference = (logits[len(one.prompt) - 1 :] - torch.stack(one.logits)).abs().max()
        print(json.dumps({"slot": one.slot, "difference": float(difference)}))
    run.close()


def sampling(seat: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=9, seed=seat, temperature=0.8 * (seat % 2), top_k=20 * (seat == 1), logprobs=1
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch_folder:
        main(sys.argv[1], Path(scratch_folder))
