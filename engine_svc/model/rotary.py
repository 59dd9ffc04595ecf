"""Tables of cos and sin for rotary positions, with the supported scalings."""

from __future__ import annotations

import math

import torch

from loraplex.base_model import BaseModelSpec


def rope_tables(
    base: BaseModelSpec, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [num_positions, 1, head_dim/2]; angles in fp32, rounded once.

    Source: Hugging Face transformers' `default`, `linear` and `llama3` rope types.
    """
    exponents = torch.arange(0, base.head_dim, 2, dtype=torch.int64).float() / base.head_dim
    frequencies = _scaled(base, 1.0 / base.rope_theta**exponents)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies).unsqueeze(1)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _scaled(base: BaseModelSpec, frequencies: torch.Tensor) -> torch.Tensor:
    scaling = base.rope_scaling
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequencies / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    # long waves are stretched, short ones kept, those between blended
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies
