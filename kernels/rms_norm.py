"""RMSNorm, with the residual add that comes before it. Plain-torch reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Semantics: out[…, i] = weight[i] · x[…, i] / √(mean_i x[…, i]² + eps), in fp32, rounded once.

    Args: x [..., N], weight [N] of the same dtype. Returns: a tensor like x.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual ← residual + x in place, then rms_norm(residual)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)
