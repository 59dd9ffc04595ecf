"""Tables of cos and sin for rotary positions, with the supported scalings."""

from __future__ import annotations

import math

import torch

from loraplex.base_model import BaseModelSpec


def rope_tables(
    base: BaseModelSpec, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [num_positions, 1, rotary_dim/2]; angles in fp32, rounded once.

    Source: Hugging Face transformers' `default`, `linear`, `llama3`, `yarn` and `longrope` rope
    types, the last one within its original context.
    """
    dim = base.rotary_dim or base.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = _scaled(base, 1.0 / base.rope_theta**exponents)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies).unsqueeze(1)
    size = _attention_factor(base)
    return (angles.cos() * size).to(device, dtype), (angles.sin() * size).to(device, dtype)


def _kind(base: BaseModelSpec) -> str:
    kind: str = base.rope_scaling.get("rope_type", base.rope_scaling.get("type", "default"))
    return kind


def _attention_factor(base: BaseModelSpec) -> float:
    """Some types make queries and keys larger, which sharpens attention over a longer context."""
    scaling, kind = base.rope_scaling, _kind(base)
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor"):
        return float(scaling["attention_factor"])
    stretch = math.log(max(float(scaling["factor"]), 1.0))
    if kind == "yarn":
        return 0.1 * stretch + 1.0
    return math.sqrt(1 + stretch / math.log(scaling["original_max_position_embeddings"]))


def _scaled(base: BaseModelSpec, frequencies: torch.Tensor) -> torch.Tensor:
    scaling, kind = base.rope_scaling, _kind(base)
    if kind == "default":
        return frequencies
    if kind == "longrope":
        return frequencies / torch.tensor(scaling["short_factor"], dtype=torch.float32)
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor
    if kind == "yarn":
        return _yarn(base, frequencies)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    # long waves are stretched, short ones kept, those between blended
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(base: BaseModelSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Pairs that turn often over the original context keep their speed, slow ones are stretched.

    Source: Peng et al., YaRN, 2023.
    """
    scaling = base.rope_scaling
    dim, original = 2 * len(frequencies), float(scaling["original_max_position_embeddings"])

    def pair_of(turns: float) -> float:
        """The pair that makes so many turns over the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base.rope_theta))

    low = max(math.floor(pair_of(float(scaling.get("beta_fast") or 32))), 0)
    high = min(math.ceil(pair_of(float(scaling.get("beta_slow") or 1))), dim - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32)
    stretched = ((pairs - low) / (high - low if high > low else 0.001)).clamp(0, 1)
    return stretched * frequencies / float(scaling["factor"]) + (1 - stretched) * frequencies
