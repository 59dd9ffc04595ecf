"""Shrink: the rows of each adapter times its A matrices. Plain-torch reference."""

from __future__ import annotations

import torch

from kernels.lora_tables import RANK_BLOCK, SegmentPlan, SiteTable


def lora_shrink(
    x: torch.Tensor,
    table: SiteTable,
    plan: SegmentPlan,
    first_entry: int,
    num_slices: int,
    u: torch.Tensor,
) -> torch.Tensor:
    """Low-rank inputs of all slices of one site, as fp32 partial sums over parts of K.

    Semantics:
        for each segment (rows t, slot s) and slice j, with e = first_entry + j and r < rank[s, e]:
        Σ_p u[p, t, j, r] = scale[s, e] · Σ_k x[t, k] · A[s, e][r, k]
        All P partials of such t, j, r are written, so nothing is zeroed before and nothing is
        added atomically: whoever reads u sums them in the order of p. Which k a partial holds is
        the kernel's choice.

    Args:
        x: [T, K] compute dtype, rows contiguous; K is the in_features of the site.
        table, plan: see kernels.lora_tables.
        first_entry: entry of the site's first slice in this layer.
        num_slices: slices of the site; their entries follow each other.
        u: [P, T, num_slices, R] fp32, contiguous in R, P = lora_tuning.num_splits(K,
            plan.tile_rows), R ≥ every rank of the table; written in place. Rows of the base and
            columns r ≥ rank[s, e] are left as they are and must not be read.

    Returns: u.
    """
    part = -(-x.shape[1] // u.shape[0])
    for first_row, num_rows, slot in plan.segments:
        rows = x[first_row : first_row + num_rows].float()
        for j in range(num_slices):
            entry = first_entry + j
            rank, scale = int(table.rank[slot, entry]), float(table.scale[slot, entry])
            for block in range(-(-rank // RANK_BLOCK)):
                r0 = block * RANK_BLOCK
                r1 = min(rank, r0 + RANK_BLOCK)
                offset = int(table.a_off[slot, entry, block])
                a = table.block(offset, r1 - r0, x.shape[1], x.dtype).float()
                for p in range(u.shape[0]):
                    k = slice(p * part, (p + 1) * part)
                    total = (rows[:, k] @ a[:, k].T) * scale
                    u[p, first_row : first_row + num_rows, j, r0:r1] = total
    return u
