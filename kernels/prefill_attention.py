"""Attention of runs of positions over pages: prefill chunks at any start. Plain-torch reference,
and the choice by device.

Index letters: T rows of the step, H heads, Hk KV heads, D head dim, P positions a page, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention_reference import attend
from kernels.attention_tuning import TILE_QUERIES


def prefill_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    layer: int,
    num_kv_heads: int,
    window: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Causal attention of the tiles' rows to their sequences' positions; softmax in fp32.

    Semantics:
        for each (first, rows, seat, start) of the first num_tiles tiles, i < rows, t = first + i,
        n = start + i; s from max(0, n − window + 1) to n (from 0 when window is 0);
        g = h // (H / Hk):
        out[t, h·D + d] = Σ_s softmax_s(Σ_e q[t, h, e] · K[s, g, e] / √D) · V[s, g, d]
        K[s], V[s] = pages[page_table[seat, s // P], layer, 0 or 1, s % P]

    Args:
        q: [T, H, D] compute dtype, contiguous.
        pages: [num_pages, L, 2, P, Hk, D] compute dtype, contiguous, P a power of two; positions
            that no row sees may hold anything, NaN included.
        page_table: [max_num_seqs, max_pages] int32, by seat.
        tiles: [capacity, 4] int32 (plan_tiles); the grid follows `capacity`, so a view of the live
            ones is the fastest where the caller knows their number.
        num_tiles: [1] int32; read on the device.
        layer: of the pages; keys and values of the tiles' rows are written already.
        num_kv_heads: Hk, a divisor of H with H / Hk ≤ 16.
        window: positions that a row sees, its own included; 0 = all.
        out: [T, H·D] compute dtype, contiguous; only the tiles' rows are written.

    Returns: out.
    """
    if q.is_cuda:
        from kernels.prefill_attention_triton import prefill_attention_triton

        return prefill_attention_triton(
            q, pages, page_table, tiles, num_tiles, layer, num_kv_heads, window, out
        )
    for first, rows, seat, start in tiles[: int(num_tiles[0])].tolist():
        part = attend(q[first : first + rows], pages, page_table[seat], start, layer, window)
        out[first : first + rows] = part
    return out


def tile_rows(num_heads: int, num_kv_heads: int) -> int:
    """Rows of a step that one tile holds at most."""
    return TILE_QUERIES // (num_heads // num_kv_heads)


def plan_tiles(chunks: Sequence[tuple[int, int, int, int]], rows: int) -> list[list[int]]:
    """The tiles of (first_row, num_rows, seat, start) chunks, `rows` rows each at most.

    Those that see the most positions come first: programs start in this order, and a long one that
    started last would be waited for alone.
    """
    tiles = [
        [first + done, min(rows, num_rows - done), seat, start + done]
        for first, num_rows, seat, start in chunks
        for done in range(0, num_rows, rows)
    ]
    tiles.sort(key=lambda tile: -(tile[3] + tile[1]))
    return tiles
