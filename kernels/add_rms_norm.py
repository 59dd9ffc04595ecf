"""The residual add and the norm after it, with the LoRA delta of the added output. Plain-torch
reference, and the choice of the device."""

from __future__ import annotations

import torch

from kernels.add_delta import add_delta
from kernels.lora_tables import LoraDelta
from kernels.rms_norm import rms_norm


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    delta: LoraDelta | None = None,
) -> torch.Tensor:
    """residual ← residual + x′, out ← norm of it; x′ is x with its gain and delta.

    Semantics:
        x′ = g ⊙ x + delta in fp32 (kernels.add_delta); residual[t, i] ← residual[t, i] + x′[t, i],
        rounded to its dtype; out[t, i] = weight[i] · residual[t, i] / √(mean_i residual[t, i]² +
        eps) in fp32, rounded once.

    Args:
        x: [T, C] compute dtype, a projection's output, rows contiguous.
        residual: [T, C] compute dtype, contiguous; changed in place.
        weight: [C] compute dtype.
        out: [T, C] compute dtype, contiguous; written in place.
        delta: of that projection; rows behind T do not count.

    Returns: out.
    """
    if x.is_cuda:
        from kernels.add_rms_norm_triton import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps, out, delta)
    residual.copy_(residual.float() + add_delta(x, delta))
    return out.copy_(rms_norm(residual, weight, eps))
