"""The base model's weights as the layers use them: projections fused, compute dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine_svc.layout import SITES
from engine_svc.model.checkpoint import Checkpoint
from engine_svc.model.linear import Linear
from loraplex.base_model import BaseModelSpec, module_path


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


def load_weights(
    folder: Path, base: BaseModelSpec, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Read a checkpoint. Raises: BaseModelUnsupported, see Checkpoint."""
    checkpoint = Checkpoint(folder, base)
    numbers = 0

    def tensor(name: str, *, kept: bool = False) -> torch.Tensor:
        """`kept` as it is, so it must be a copy: a view would hold the mapped file."""
        nonlocal numbers
        loaded = checkpoint.tensor(name).to(device=device, dtype=dtype, copy=kept)
        numbers += loaded.numel()
        return loaded

    def norm(name: str) -> torch.Tensor:
        return tensor(name, kept=True)

    def fused(layer: int, site: str, has_bias: bool) -> Linear:
        paths = [module_path(layer, name) for name in base.stored_modules(SITES[site])]
        weight = torch.cat([tensor(f"{path}.weight") for path in paths])
        bias = torch.cat([tensor(f"{path}.bias") for path in paths]) if has_bias else None
        return Linear(weight, bias)

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
    head_name = "model.embed_tokens.weight" if base.tied_embeddings else "lm_head.weight"
    head = Linear(tensor(head_name, kept=True))
    embedding = checkpoint.tensor("model.embed_tokens.weight").to(device, copy=True)
    num_bytes = numbers * dtype.itemsize + embedding.numel() * embedding.dtype.itemsize
    return ModelWeights(embedding, layers, final_norm, head, num_bytes)
