"""What the LoRA kernels read: the site table over the arena's bytes, and the segments of a step.

Offsets count OFFSET_UNIT bytes from the arena's base, −1 is none, so that loads vectorise and a
torch reference indexes the same bytes as a kernel. A and B are cut into blocks of up to RANK_BLOCK
rows: block b of an entry of rank r has min(RANK_BLOCK, r − RANK_BLOCK·b) rows.

Index letters: S slots, E entries (layer, slice), RB rank blocks, F cells (layer, site), T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

RANK_BLOCK = 16
OFFSET_UNIT = 16
#: rows of one work item; a segment of n rows has ⌈n / tile rows⌉ of them. Steps with segments of
#: hundreds of rows (prefill) take the large one
TILE_ROWS = 16
PREFILL_TILE_ROWS = 128


@dataclass(frozen=True, slots=True)
class SiteTable:
    """One row a slot. A slot without an adapter has rank 0 and offsets −1 everywhere.

    Args:
        arena: [num_bytes] uint8, the whole arena, its base aligned to OFFSET_UNIT.
        a_off: [S, E, RB] int64; block of A, [rows, in_features] row-major in the compute dtype.
        b_off: [S, E, RB] int64; block of B, rank-major: [rows, num_cols] in the compute dtype.
        rank: [S, E] int32; 0 = this slice has no LoRA.
        scale: [S, E] fp32; multiplies the fp32 shrink output.
        g_off: [S, F] int64; gain of a site's output rows, [out_features] fp32; −1 = all ones.
        c_off: [S, F] int64; constant of a site's output rows, [out_features] fp32; −1 = all zeros.
        live: [S, F] uint8; 1 = the slot adds something at that site: a slice of rank > 0, or a
            constant. Only such rows of a delta are written, and only they are read. A gain needs
            no delta: the consumer applies it from g_off.
    """

    arena: torch.Tensor
    a_off: torch.Tensor
    b_off: torch.Tensor
    rank: torch.Tensor
    scale: torch.Tensor
    g_off: torch.Tensor
    c_off: torch.Tensor
    live: torch.Tensor

    def block(self, offset: int, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, cols] view of the arena at an offset of this table."""
        start = offset * OFFSET_UNIT
        return self.arena[start : start + rows * cols * dtype.itemsize].view(dtype).view(rows, cols)


@dataclass(frozen=True, slots=True)
class SiteColumns:
    """Where the slices of one site lie in its output; the same for every layer and slot.

    Args:
        spans: (col0, num_cols) of each slice.
        device_spans: [num_slices, 2] int32, the same on the device.
    """

    spans: tuple[tuple[int, int], ...]
    device_spans: torch.Tensor

    @property
    def num_slices(self) -> int:
        return len(self.spans)

    @property
    def aligned(self) -> bool:
        """Every slice begins and ends at a multiple of 16 columns."""
        return all(col0 % 16 == num_cols % 16 == 0 for col0, num_cols in self.spans)

    def num_blocks(self, width: int) -> int:
        """Blocks of up to `width` columns that do not cross slices."""
        return sum(-(-num_cols // width) for _, num_cols in self.spans)


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What a consumer adds to the output y of a site's GEMM: y ← g ⊙ y + delta, in fp32.

    Semantics:
        for each row t with s = row_slot[t] ≥ 0:
        g[n] = 1 where g_off[s, cell] is −1; delta[t, n] counts as 0 where live[s, cell] is 0.
        Rows with row_slot −1 stay as they are.

    Args:
        delta: [T, out_features] compute dtype, rows contiguous, from lora_delta; rows that are not
            live there hold anything, NaN included, and must not be read.
        row_slot: [T] int32; −1 = a row without an adapter, or padding.
        table: see SiteTable.
        cell: the site's cell in this layer.
    """

    delta: torch.Tensor
    row_slot: torch.Tensor
    table: SiteTable
    cell: int


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """Which rows of a step belong to which slot: built once a step, read by every layer.

    Args:
        segments: (first_row, num_rows, slot) of the live adapters; rows of the base are in none.
        tiles: [capacity, 3] int32: (slot, first_row, num_rows ≤ tile_rows); the work list.
        num_tiles: [1] int32; tiles at and after this index are not work. The length is read on the
            device, so a grid does not depend on it.
        shrink_tiles: [capacity, 4] int32: (slot, first_row, num_rows, rank block), the tiles once
            for each rank block of their slot: the work list of decode's shrink, whose items are so
            of one size whatever the ranks.
        num_shrink_tiles: [1] int32, as num_tiles.
        tile_rows: TILE_ROWS, or PREFILL_TILE_ROWS for a step with long segments; chooses the
            kernels.
    """

    segments: tuple[tuple[int, int, int], ...]
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    shrink_tiles: torch.Tensor
    num_shrink_tiles: torch.Tensor
    tile_rows: int = TILE_ROWS


def plan_segments(
    segments: Sequence[tuple[int, int, int]],
    capacity: int,
    rank_blocks: Sequence[int],
    device: torch.device,
    tile_rows: int = TILE_ROWS,
) -> SegmentPlan:
    """The plan of (first_row, num_rows, slot) segments; those of slot −1 or without rows are left
    out.

    Args:
        capacity: bounds the tiles: max rows // tile_rows + max segments is always enough.
        rank_blocks: of each slot, the most rank blocks that one of its slices has.
    """
    live = tuple(segment for segment in segments if segment[2] >= 0 and segment[1] > 0)
    work = [
        (slot, first + done, min(tile_rows, rows - done))
        for first, rows, slot in live
        for done in range(0, rows, tile_rows)
    ]
    shrinks = [(*tile, block) for tile in work for block in range(rank_blocks[tile[0]])]
    most = max(1, *rank_blocks) if len(rank_blocks) else 1
    return SegmentPlan(
        live,
        *_work_list(work, (capacity, 3), device),
        *_work_list(shrinks, (capacity * most, 4), device),
        tile_rows,
    )


def _work_list(
    work: Sequence[tuple[int, ...]], shape: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the list, how much of it is work)."""
    assert len(work) <= shape[0], (len(work), shape)
    made = torch.zeros(shape, dtype=torch.int32)
    if work:
        made[: len(work)] = torch.tensor(work, dtype=torch.int32)
    return made.to(device), torch.tensor([len(work)], dtype=torch.int32).to(device)


def site_columns(spans: Sequence[tuple[int, int]], device: torch.device) -> SiteColumns:
    """The columns of a site's slices, given as (col0, num_cols)."""
    return SiteColumns(tuple(spans), torch.tensor(spans, dtype=torch.int32, device=device))
