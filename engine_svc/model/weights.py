"""The base model's weights as the layers use them: projections fused, compute dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from engine_svc.layout import SITES
from engine_svc.model.checkpoint import Checkpoint, expected_shapes
from engine_svc.model.dummy import DummyWeights
from engine_svc.model.linear import Linear
from loraplex.base_model import BaseModelSpec, module_path

#: load formats: the folder's checkpoint, or random numbers of the config's shapes
AUTO, DUMMY = "auto", "dummy"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. q_norm and k_norm [head_dim] are None where the model has none."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def sites(self) -> tuple[Linear, ...]:
        """In the order of engine_svc.layout.SITES."""
        return (self.qkv, self.o, self.gate_up, self.down)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`embedding` [vocab, hidden] keeps the checkpoint's dtype: rows are cast as they are read."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Linear
    num_bytes: int


class WeightSource(Protocol):
    """Tensors by their names in a checkpoint."""

    def dtype(self, name: str) -> torch.dtype:
        """In which the source keeps the tensor."""
        ...

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` in place: the tensor's shape, contiguous, any dtype, the engine's device."""
        ...


def load_weights(
    folder: Path,
    base: BaseModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = AUTO,
) -> ModelWeights:
    """Read a checkpoint, straight into where its numbers stay, or make up one.

    Args: load_format, AUTO or DUMMY; DUMMY opens no file.
    Raises: BaseModelUnsupported, see Checkpoint.
    """
    source: WeightSource
    source = DummyWeights(dtype) if load_format == DUMMY else Checkpoint(folder, base, device)
    shapes = expected_shapes(base)
    numbers = 0

    def stacked(names: list[str], kept_dtype: torch.dtype = dtype) -> torch.Tensor:
        """The named tensors below each other, each read into its rows."""
        nonlocal numbers
        rows = [shapes[name][0] for name in names]
        shape = (sum(rows), *shapes[names[0]][1:])
        out = torch.empty(shape, dtype=kept_dtype, device=device)
        for name, part in zip(names, torch.split(out, rows), strict=True):
            source.read(name, part)
        numbers += out.numel()
        return out

    def norm(name: str) -> torch.Tensor:
        return stacked([name])

    def fused(layer: int, site: str, has_bias: bool) -> Linear:
        paths = [module_path(layer, name) for name in base.stored_modules(SITES[site])]
        weight = stacked([f"{path}.weight" for path in paths])
        return Linear(weight, stacked([f"{path}.bias" for path in paths]) if has_bias else None)

    def layer_weights(layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}"
        return LayerWeights(
            input_norm=norm(f"{prefix}.input_layernorm.weight"),
            qkv=fused(layer, "qkv", base.qkv_bias),
            q_norm=norm(f"{prefix}.self_attn.q_norm.weight") if base.qk_norm else None,
            k_norm=norm(f"{prefix}.self_attn.k_norm.weight") if base.qk_norm else None,
            o=fused(layer, "o", base.o_bias),
            post_norm=norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=fused(layer, "gate_up", base.mlp_bias),
            down=fused(layer, "down", base.mlp_bias),
        )

    layers = tuple(layer_weights(layer) for layer in range(base.num_layers))
    final_norm = norm("model.norm.weight")
    embedding_name = "model.embed_tokens.weight"
    head = Linear(stacked([embedding_name if base.tied_embeddings else "lm_head.weight"]))
    num_bytes = numbers * dtype.itemsize
    embedding = stacked([embedding_name], source.dtype(embedding_name))
    return ModelWeights(embedding, layers, final_norm, head, num_bytes + embedding.nbytes)
