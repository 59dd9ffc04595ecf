"""Attention of rows that are one position of their sequence each, over pages. Plain-torch
reference, and the choice by device.

Index letters: T rows of the step, Bd decode rows of the launch, H heads, Hk KV heads, D head dim, P
positions a page, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention_reference import attend
from kernels.attention_tuning import most_parts


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Where the parts of a split context wait for their sum; one serves all layers and batches.

    Args:
        parts: [n] fp32; normalised outputs of the parts.
        weights: [m] fp32; log2 of the sum of exponentials of each part.
        arrived: [rows · Hk] int32; zeros between launches, each launch leaves them so.
    """

    parts: torch.Tensor
    weights: torch.Tensor
    arrived: torch.Tensor


def decode_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    decode_rows: torch.Tensor,
    row_seat: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    num_kv_heads: int,
    window: int,
    out: torch.Tensor,
    scratch: DecodeScratch | None = None,
) -> torch.Tensor:
    """One query row against its sequence's keys and values, its own included; softmax in fp32.

    Semantics:
        for each t in decode_rows, t ≥ 0; n = positions[t]; s from max(0, n − window + 1) to n
        (from 0 when window is 0); g = h // (H / Hk):
        out[t, h·D + d] = Σ_s softmax_s(Σ_e q[t, h, e] · K[s, g, e] / √D) · V[s, g, d]
        K[s], V[s] = pages[page_table[row_seat[t], s // P], layer, 0 or 1, s % P]

    Args:
        q: [T, H, D] compute dtype, contiguous.
        pages: [num_pages, L, 2, P, Hk, D] compute dtype, contiguous, P a power of two; positions
            that no row sees may hold anything, NaN included.
        page_table: [max_num_seqs, max_pages] int32, by seat.
        decode_rows: [Bd] int32; −1 = none.
        row_seat, positions: [T] int32; the keys and values of these positions are written already.
        layer: of the pages.
        num_kv_heads: Hk, a divisor of H with H / Hk ≤ 16.
        window: positions that a row sees, its own included; 0 = all.
        out: [T, H·D] compute dtype, contiguous; only the decode rows are written.
        scratch: from decode_scratch, for at least Bd rows; needed on a GPU only.

    Returns: out.
    """
    if q.is_cuda:
        from kernels.decode_attention_triton import decode_attention_triton

        assert scratch is not None
        return decode_attention_triton(
            q, pages, page_table, decode_rows, row_seat, positions, layer, num_kv_heads, window,
            out, scratch,
        )  # fmt: skip
    for row in decode_rows.tolist():
        if row >= 0:
            table, position = page_table[int(row_seat[row])], int(positions[row])
            out[row] = attend(q[row : row + 1], pages, table, position, layer, window)[0]
    return out


def decode_scratch(
    max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
) -> DecodeScratch:
    """Scratch for launches of up to `max_rows` decode rows."""
    parts = 0
    if device.type == "cuda":
        parts = most_parts(max_rows, num_kv_heads)
    return DecodeScratch(
        torch.empty(parts * num_heads * head_dim, dtype=torch.float32, device=device),
        torch.empty(parts * num_heads, dtype=torch.float32, device=device),
        torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
    )
