"""A random two-layer Llama with a byte-level tokenizer: loads in milliseconds, answers nonsense.

write_tiny_model(tmp_path / "tiny")           a folder that the engine serves
write_tiny_adapter(tmp_path / "a", seed=1)    a PEFT folder for it whose effect is visible
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

from loraplex.base_model import LAYER_MODULES, module_path, parse_config
from tests.support.tiny_adapters import adapter_tensors, safetensors_bytes, write_adapter

TINY_NAME = "tiny-llama"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256 + len(SPECIAL_TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "bos_token_id": 256,
    "eos_token_id": 258,
    "tie_word_embeddings": True,
    "dtype": "float32",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(folder: Path, seed: int = 0) -> Path:
    """config.json, model.safetensors, tokenizer.json, tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = parse_config(CONFIG)
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return rng.normal(0.0, columns**-0.5, (rows, columns)).astype("float32")

    ones = np.ones(spec.hidden_size, "float32")
    tensors = {
        "model.embed_tokens.weight": matrix(spec.vocab_size, spec.hidden_size) * 4,
        "model.norm.weight": ones,
    }
    for layer in range(spec.num_layers):
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = ones
        tensors[f"model.layers.{layer}.post_attention_layernorm.weight"] = ones
        for module in LAYER_MODULES:
            in_features, out_features = spec.module_shape(module)
            name = module_path(layer, module)
            tensors[f"{name}.weight"] = matrix(out_features, in_features)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 258}))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": "<|im_end|>"})
    )
    return folder


def write_tiny_adapter(folder: Path, seed: int, rank: int = 4, **config: Any) -> Path:
    """A LoRA on all linear modules of the tiny model."""
    spec = parse_config(CONFIG)
    tensors = adapter_tensors(spec, LAYER_MODULES, rank=rank, seed=seed)
    scaled = {name: tensor * 0.3 for name, tensor in tensors.items()}
    return write_adapter(
        folder,
        tensors=scaled,
        config={
            "base_model_name_or_path": TINY_NAME,
            "target_modules": sorted(LAYER_MODULES),
            "r": rank,
            "lora_alpha": 2 * rank,
            **config,
        },
    )


def _tokenizer() -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [
        {
            "id": 256 + index, "content": token, "special": True, "single_word": False,
            "lstrip": False, "rstrip": False, "normalized": False,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {letter: index for index, letter in enumerate(alphabet)}, "merges": [],
        },
    }  # fmt: skip
