"""Expand: low-rank inputs times B, added to a site's output with the epilogue. Plain-torch
reference."""

from __future__ import annotations

import torch

from kernels.lora_tables import RANK_BLOCK, SegmentPlan, SiteColumns, SiteTable


def lora_expand(
    u: torch.Tensor,
    table: SiteTable,
    plan: SegmentPlan,
    first_entry: int,
    columns: SiteColumns,
    cell: int,
    y: torch.Tensor,
) -> torch.Tensor:
    """Epilogue of one site: y ← g ⊙ y + c + B·u, accumulated in fp32, rounded once.

    Semantics:
        for each segment (rows t, slot s), slice j with columns n = col0 … col0 + num_cols − 1 and
        e = first_entry + j:
        y[t, n] = g[s, cell][n] · y[t, n] + c[s, cell][n] + Σ_{r < rank[s, e]} u[t, j, r] ·
        B[s, e][r, n − col0]
        g is 1 where g_off[s, cell] is −1, c is 0 where c_off[s, cell] is −1. Rows of the base do
        not change.

    Args:
        u: [T, num_slices, R] fp32 from lora_shrink (scaled); columns r ≥ rank are not read.
        table, plan: see kernels.lora_tables.
        first_entry: entry of the site's first slice in this layer.
        columns: the site's slices; together they cover all N columns.
        cell: the site's cell in this layer.
        y: [T, N] compute dtype, rows contiguous; changed in place.

    Returns: y.
    """
    for first_row, num_rows, slot in plan.segments:
        rows = slice(first_row, first_row + num_rows)
        total = y[rows].float()
        gain, constant = int(table.g_off[slot, cell]), int(table.c_off[slot, cell])
        if gain >= 0:
            total = total * table.block(gain, 1, y.shape[1], torch.float32)
        if constant >= 0:
            total = total + table.block(constant, 1, y.shape[1], torch.float32)
        for j, (col0, num_cols) in enumerate(columns.spans):
            entry = first_entry + j
            rank = int(table.rank[slot, entry])
            for block in range(-(-rank // RANK_BLOCK)):
                r0 = block * RANK_BLOCK
                r1 = min(rank, r0 + RANK_BLOCK)
                offset = int(table.b_off[slot, entry, block])
                b = table.block(offset, r1 - r0, num_cols, y.dtype)
                total[:, col0 : col0 + num_cols] += u[rows, j, r0:r1] @ b.float()
        y[rows] = total.to(y.dtype)
    return y
