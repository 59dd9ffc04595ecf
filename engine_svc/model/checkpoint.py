"""Tensors of a Hugging Face safetensors folder by name, memory-mapped, single file or sharded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine_svc.layout import SITES
from engine_svc.model.weight_staging import Staging
from loraplex.base_model import BaseModelSpec, module_path
from loraplex.status import BaseModelUnsupported

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: buffers that old checkpoints carry and the config determines
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_NAMES_SHOWN = 5
_HOST = torch.device("cpu")


def expected_shapes(base: BaseModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must have, without a tied output head."""
    hidden = base.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (base.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not base.tied_embeddings:
        shapes["lm_head.weight"] = (base.vocab_size, hidden)
    biased = {
        "q_proj": base.qkv_bias, "k_proj": base.qkv_bias, "v_proj": base.qkv_bias,
        "o_proj": base.o_bias, "gate_proj": base.mlp_bias, "up_proj": base.mlp_bias,
        "down_proj": base.mlp_bias,
    }  # fmt: skip
    for layer in range(base.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if base.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (base.head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (base.head_dim,)
        stored = [name for modules in SITES.values() for name in base.stored_modules(modules)]
        for module in stored:
            has_bias = biased.get(module, False)
            in_features, out_features = base.module_shape(module)
            shapes[f"{module_path(layer, module)}.weight"] = (out_features, in_features)
            if has_bias:
                shapes[f"{module_path(layer, module)}.bias"] = (out_features,)
    return shapes


class Checkpoint:
    """The tensors of `folder`, checked against the config: none missing, none unknown, shapes
    right. Implements `weights.WeightSource` for one device.

    Raises: BaseModelUnsupported naming the tensors or files.
    """

    def __init__(self, folder: Path, base: BaseModelSpec, device: torch.device = _HOST) -> None:
        self._folder = folder
        self._staging = Staging(device) if device.type == "cuda" else None
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()
        expected = expected_shapes(base)
        #: of every tensor that the model uses
        self.names = tuple(expected)
        found = {name for name in self._file_of if not _DERIVED.search(name)}
        if base.tied_embeddings:
            found.discard("lm_head.weight")
        _refuse_names("tensors missing", expected.keys() - found, "every tensor of the config")
        _refuse_names("unknown tensors", found - expected.keys(), "only tensors of the config")
        for name, shape in expected.items():
            actual = tuple(self._slice(name).get_shape())
            if actual != shape:
                raise BaseModelUnsupported(f"shape of {name}", actual, str(shape))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in the checkpoint's dtype; a view of the mapped file where the platform
        allows."""
        tensor: torch.Tensor = self._file(self._file_of[name]).get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        return self.tensor(name).dtype

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out`, in place, with a tensor; another dtype is cast, on the device."""
        tensor = self.tensor(name)
        if self._staging is None:
            out.copy_(tensor)
        elif tensor.dtype == out.dtype:
            self._staging.copy(tensor, out)
        else:
            stored = torch.empty_like(out, dtype=tensor.dtype)
            self._staging.copy(tensor, stored)
            out.copy_(stored)

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._file_of[name]

    def _slice(self, name: str) -> Any:
        return self._file(self._file_of[name]).get_slice(name)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            try:
                self._files[name] = safe_open(str(self._folder / name), framework="pt")
            except (OSError, SafetensorError) as error:
                raise BaseModelUnsupported(name, str(error), "a readable safetensors file") from (
                    error
                )
        return self._files[name]

    def _locate(self) -> Mapping[str, str]:
        """Tensor name → file name."""
        index = self._folder / _INDEX
        if index.is_file():
            try:
                files = dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise BaseModelUnsupported(
                    _INDEX, str(error), "a JSON object with weight_map"
                ) from (error)
            for name in sorted(set(files.values())):
                if "/" in name or not (self._folder / name).is_file():
                    raise BaseModelUnsupported(_INDEX, name, "files that lie beside the index")
            known = {file: set(self._file(file).keys()) for file in set(files.values())}
            absent = {name for name, file in files.items() if name not in known[file]}
            _refuse_names("tensors missing", absent, f"every tensor that {_INDEX} names")
            return files
        if (self._folder / _SINGLE).is_file():
            return {name: _SINGLE for name in self._file(_SINGLE).keys()}  # noqa: SIM118
        pickles = sorted(p.name for p in self._folder.glob("*.bin"))
        found = ", ".join(pickles) or "no weights"
        raise BaseModelUnsupported(
            "weights", found, f"{_SINGLE} or {_INDEX} (save with save_pretrained)"
        )


def _refuse_names(what: str, names: set[str], limit: str) -> None:
    if names:
        shown = ", ".join(sorted(names)[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        raise BaseModelUnsupported(what, shown + more, limit)
