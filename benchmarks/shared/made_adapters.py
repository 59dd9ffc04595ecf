"""Adapters of the 8B shape, written from nothing but sizes: random numbers, or a file with a hole.

Packing and checking look at shapes and values, never at what a model would answer.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from loraplex.adapter_format import CONFIG_FILE, WEIGHTS_FILE, BaseModelFacts
from loraplex.base_model import LAYER_MODULES, module_path, parse_config

#: Llama 3.1 8B, as its config.json says
CONFIG_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "eos_token_id": 128009, "dtype": "bfloat16",
}  # fmt: skip
BASE_8B = BaseModelFacts("shape-8b", (), parse_config(CONFIG_8B))
#: all linears in bf16: exactly 100 MiB
RANK_OF_100_MB = 20
_CHUNK_ITEMS = 1 << 20


def write_adapter(
    folder: Path,
    rank: int,
    base: BaseModelFacts = BASE_8B,
    *,
    saved: tuple[str, ...] = (),
    seed: int | None = 0,
) -> Path:
    """A PEFT folder in bf16: LoRA on all linears, and `saved` modules whole.

    Args: seed, of normal numbers; None leaves a hole that reads as zeros, for plans that read no
    values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shapes = dict(_shapes(base, rank, saved))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (rows, columns) in shapes.items():
        start, end = end, end + 2 * rows * columns
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        if seed is None:
            file.truncate(8 + len(text) + end)
        else:
            for chunk in _numbers(end // 2, seed):
                file.write(chunk)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base.name,
        "r": rank, "lora_alpha": 2 * rank, "target_modules": list(LAYER_MODULES),
        "modules_to_save": list(saved) or None,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def _shapes(
    base: BaseModelFacts, rank: int, saved: tuple[str, ...]
) -> Iterator[tuple[str, tuple[int, int]]]:
    for layer in range(base.spec.num_layers):
        for module in LAYER_MODULES:
            name = f"base_model.model.{module_path(layer, module)}"
            in_features, out_features = base.spec.module_shape(module)
            yield f"{name}.lora_A.weight", (rank, in_features)
            yield f"{name}.lora_B.weight", (out_features, rank)
    for module in saved:
        path = module if module == "lm_head" else f"model.{module}"
        yield f"base_model.model.{path}.weight", (base.spec.vocab_size, base.spec.hidden_size)


def _numbers(count: int, seed: int) -> Iterator[bytes]:
    """bf16 normal numbers of a hundredth, cut off instead of rounded."""
    rng = np.random.default_rng(seed)
    for start in range(0, count, _CHUNK_ITEMS):
        wide = rng.standard_normal(min(_CHUNK_ITEMS, count - start), np.float32) * np.float32(0.01)
        yield (wide.view(np.uint32) >> 16).astype("<u2").tobytes()
