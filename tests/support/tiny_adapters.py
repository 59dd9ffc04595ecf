"""Small PEFT-like folders and base models, written without PEFT or torch.

base = tiny_base()                        a BaseModelFacts of two layers
folder = write_adapter(tmp_path / "a")    an adapter that check_adapter accepts for it
write_base_folder(tmp_path / "base")      config.json, tokenizer.json and weights of that base
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loraplex.adapter_format import BaseModelFacts
from loraplex.base_folder import read_base_folder
from loraplex.base_model import LAYER_MODULES, BaseModelSpec, module_path, parse_config

BASE_NAME = "tiny-base"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "dtype": "float32",
}

Array = npt.NDArray[Any]


def tiny_base(**changes: Any) -> BaseModelFacts:
    """A base model that is only shapes; `changes` go to its config.json."""
    spec = parse_config({**CONFIG, **changes})
    return BaseModelFacts(BASE_NAME, ("org/tiny",), spec, eos_token_ids=spec.eos_token_ids)


def adapter_config(**changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": BASE_NAME,
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        **changes,
    }


def adapter_tensors(
    spec: BaseModelSpec,
    modules: Iterable[str] = ("q_proj", "v_proj"),
    layers: Iterable[int] | None = None,
    rank: int | Mapping[str, int] = 4,
    seed: int = 0,
    prefix: str = "base_model.model.",
) -> dict[str, Array]:
    """fp32 matrices under PEFT's names; `rank` may differ by module."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for layer in range(spec.num_layers) if layers is None else layers:
        for module in modules:
            in_features, out_features = spec.module_shape(module)
            r = rank if isinstance(rank, int) else rank[module]
            name = prefix + module_path(layer, module)
            tensors[f"{name}.lora_A.weight"] = rng.normal(size=(r, in_features)).astype("float32")
            tensors[f"{name}.lora_B.weight"] = rng.normal(size=(out_features, r)).astype("float32")
    return tensors


def write_adapter(
    folder: Path,
    spec: BaseModelSpec | None = None,
    *,
    tensors: Mapping[str, Array] | None = None,
    dtype: str = "F32",
    config: Mapping[str, Any] | None = None,
    **tensor_options: Any,
) -> Path:
    """A PEFT folder. `dtype` is F32, F16 or BF16; `config` are changes to `adapter_config`."""
    folder.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = adapter_tensors(spec or parse_config(CONFIG), **tensor_options)
    changes = dict(config or {})
    changes.setdefault(
        "target_modules", sorted(tensor_options.get("modules", ["q_proj", "v_proj"]))
    )
    if isinstance(tensor_options.get("rank"), int):
        changes.setdefault("r", tensor_options["rank"])
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(**changes)))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
    return folder


def safetensors_bytes(tensors: Mapping[str, Array], dtype: str = "F32") -> bytes:
    """A safetensors file; bfloat16 is rounded to nearest even."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, tensor in tensors.items():
        payload = _encoded(tensor, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [len(body), len(body) + len(payload)],
        }
        body += payload
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def all_module_ranks(rank: int = 4) -> dict[str, int]:
    return dict.fromkeys(LAYER_MODULES, rank)


def tokenizer_json(size: int = 64) -> dict[str, Any]:
    """One token a letter, ids 0 … size − 1; id 2 is `</s>`."""
    vocab = {chr(0x4E00 + index): index for index in range(size)}
    del vocab[chr(0x4E00 + 2)]
    return {
        "version": "1.0",
        "added_tokens": [{"id": 2, "content": "</s>", "special": True}],
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }


def write_base_folder(folder: Path, template: str = "{{ messages }}") -> Path:
    """A base model folder that `read_base_folder` takes; its one weight file holds one tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "</s>"})
    )
    weight = {"model.norm.weight": np.ones(32, "float32")}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weight))
    return folder


def base_of(folder: Path) -> BaseModelFacts:
    return read_base_folder(folder, BASE_NAME, ("org/tiny",))[0]


def _encoded(tensor: Array, dtype: str) -> bytes:
    if dtype == "F32":
        return tensor.astype("<f4").tobytes()
    if dtype == "F16":
        return tensor.astype("<f2").tobytes()
    bits = np.ascontiguousarray(tensor, "<f4").view("<u4").astype("<u8")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = np.where(np.isnan(tensor), 0x7FC0, rounded)
    return quiet.astype("<u2").tobytes()
