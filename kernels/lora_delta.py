"""Delta: low-rank inputs times B, stored for the consumer of a site's output to add. Plain-torch
reference."""

from __future__ import annotations

import torch

from kernels.lora_tables import RANK_BLOCK, SegmentPlan, SiteColumns, SiteTable


def lora_delta(
    u: torch.Tensor,
    table: SiteTable,
    plan: SegmentPlan,
    first_entry: int,
    columns: SiteColumns,
    cell: int,
    delta: torch.Tensor,
) -> torch.Tensor:
    """What the adapters add to one site's output: c + B·u, accumulated in fp32, rounded once.

    Semantics:
        for each segment (rows t, slot s) with live[s, cell], slice j with columns n = col0 …
        col0 + num_cols − 1 and e = first_entry + j:
        v[t, j, r] = round(Σ_p u[p, t, j, r]), to delta's dtype
        delta[t, n] = c[s, cell][n] + Σ_{r < rank[s, e]} v[t, j, r] · B[s, e][r, n − col0]
        c is 0 where c_off[s, cell] is −1. All N columns of such rows are written; other rows are
        left as they are. The consumer adds delta (kernels.lora_add, or a kernel that reads y
        anyway), and applies the gain.

    Args:
        u: [P, T, num_slices, R] fp32 from lora_shrink (scaled); columns r ≥ rank are not read.
        table, plan: see kernels.lora_tables.
        first_entry: entry of the site's first slice in this layer.
        columns: the site's slices; together they cover all N columns.
        cell: the site's cell in this layer.
        delta: [T, N] compute dtype, rows contiguous; written in place.

    Returns: delta.
    """
    for first_row, num_rows, slot in plan.segments:
        if not table.live[slot, cell]:
            continue
        rows = slice(first_row, first_row + num_rows)
        total = torch.zeros(num_rows, delta.shape[1], device=delta.device)
        constant = int(table.c_off[slot, cell])
        if constant >= 0:
            total += table.block(constant, 1, delta.shape[1], torch.float32)
        for j, (col0, num_cols) in enumerate(columns.spans):
            entry = first_entry + j
            rank = int(table.rank[slot, entry])
            for block in range(-(-rank // RANK_BLOCK)):
                r0 = block * RANK_BLOCK
                r1 = min(rank, r0 + RANK_BLOCK)
                offset = int(table.b_off[slot, entry, block])
                b = table.block(offset, r1 - r0, num_cols, delta.dtype)
                v = u[:, rows, j, r0:r1].sum(0).to(delta.dtype)
                total[:, col0 : col0 + num_cols] += v.float() @ b.float()
        delta[rows] = total.to(delta.dtype)
    return delta
