"""Rotary position embedding, half-split pairs (i, i + R/2). Plain-torch reference."""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of each head's first R numbers by its position's angles.

    Semantics, with h = R/2 and i < h:
        out[t, n, i]     = x[t, n, i] · cos[t, i] − x[t, n, h + i] · sin[t, i]
        out[t, n, h + i] = x[t, n, h + i] · cos[t, i] + x[t, n, i] · sin[t, i]
        out[t, n, j]     = x[t, n, j] for j ≥ R

    Args:
        x: [T, heads, D], D ≥ R; heads may be strided.
        cos, sin: [T, 1, R/2] in x's dtype, of the angles of each row's position.

    Returns: [T, heads, D], contiguous.
    Source: Su et al., RoFormer, 2021; pairs as in Hugging Face checkpoints.
    """
    half = cos.shape[-1]
    low, high = x[..., :half], x[..., half : 2 * half]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out_low, out_high = out[..., :half], out[..., half : 2 * half]
    torch.mul(low, cos, out=out_low)
    torch.mul(high, cos, out=out_high)
    out_low.addcmul_(high, sin, value=-1)
    out_high.addcmul_(low, sin)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
