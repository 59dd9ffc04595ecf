"""Expand on the GPU: kernels.lora_expand as one launch for all slices of a site."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lora_tables import (
    OFFSET_UNIT,
    RANK_BLOCK,
    TILE_ROWS,
    SegmentPlan,
    SiteColumns,
    SiteTable,
)

#: grid: programs that walk the tiles, beside one program a block of columns. First values, not
#: tuned.
TILE_PROGRAMS = 32
BLOCK_N = 128
NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def column_block(spans, index, NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """(slice, first column inside it) of the index-th block of columns of a site."""
    slice_index, start, first = 0, 0, 0
    for i in tl.static_range(NUM_SLICES):
        here = first + tl.cdiv(tl.load(spans + 2 * i + 1), BLOCK_N)
        inside = (index >= first) & (index < here)
        slice_index = tl.where(inside, i, slice_index)
        start = tl.where(inside, (index - first) * BLOCK_N, start)
        first = here
    return slice_index, start


@triton.jit(do_not_specialize=["first_entry", "cell"])  # type: ignore[untyped-decorator]
def expand_kernel(  # type: ignore[no-untyped-def]
    u,
    arena,
    b_off,
    rank_of,
    g_off,
    c_off,
    spans,
    tiles,
    num_tiles,
    y,
    first_entry,
    cell,
    num_entries,
    num_blocks,
    num_cells,
    u_row_stride,
    u_slice_stride,
    y_stride,
    NUM_SLICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Program (p, b): tiles p, p + P, …; block b of the site's columns."""
    slice_index, start = column_block(spans, tl.program_id(1), NUM_SLICES, BLOCK_N)
    col0 = tl.load(spans + 2 * slice_index)
    num_cols = tl.load(spans + 2 * slice_index + 1)
    if ALIGNED:
        col0, num_cols, start = (
            tl.multiple_of(col0, 16),
            tl.multiple_of(num_cols, 16),
            tl.multiple_of(start, 16),
        )
    rows = tl.arange(0, TILE_ROWS)
    ranks = tl.arange(0, RANK_BLOCK)
    columns = start + tl.arange(0, BLOCK_N)
    live_columns = columns < num_cols
    for tile in range(tl.program_id(0), tl.load(num_tiles), tl.num_programs(0)):
        slot = tl.load(tiles + 3 * tile).to(tl.int64)
        first_row = tl.load(tiles + 3 * tile + 1).to(tl.int64)
        live_rows = rows < tl.load(tiles + 3 * tile + 2)
        entry = slot * num_entries + first_entry + slice_index
        rank = tl.load(rank_of + entry)
        gain = tl.load(g_off + slot * num_cells + cell)
        constant = tl.load(c_off + slot * num_cells + cell)
        if (rank > 0) | (gain >= 0) | (constant >= 0):
            target = y + (first_row + rows)[:, None] * y_stride + (col0 + columns)[None, :]
            live = live_rows[:, None] & live_columns[None, :]
            total = tl.load(target, mask=live, other=0.0).to(tl.float32)
            if gain >= 0:
                g = (arena + gain * OFFSET_UNIT).to(tl.pointer_type(tl.float32))
                g_tile = tl.load(g + col0 + columns, mask=live_columns, other=1.0)
                total = total * g_tile[None, :]
            if constant >= 0:
                c = (arena + constant * OFFSET_UNIT).to(tl.pointer_type(tl.float32))
                c_tile = tl.load(c + col0 + columns, mask=live_columns, other=0.0)
                total = total + c_tile[None, :]
            u_rows = u + (first_row + rows)[:, None] * u_row_stride + slice_index * u_slice_stride
            for block in range(tl.cdiv(rank, RANK_BLOCK)):
                live_ranks = block * RANK_BLOCK + ranks < rank
                u_tile = tl.load(
                    u_rows + (block * RANK_BLOCK + ranks)[None, :],
                    mask=live_rows[:, None] & live_ranks[None, :],
                    other=0.0,
                )
                offset = tl.load(b_off + entry * num_blocks + block) * OFFSET_UNIT
                b = (arena + offset).to(tl.pointer_type(y.dtype.element_ty))
                b_tile = tl.load(
                    tl.multiple_of(b, 16)
                    + ranks[:, None].to(tl.int64) * num_cols
                    + columns[None, :],
                    mask=live_ranks[:, None] & live_columns[None, :],
                    other=0.0,
                )
                total = tl.dot(u_tile, b_tile.to(tl.float32), total, input_precision="tf32x3")
            tl.store(target, total.to(y.dtype.element_ty), mask=live)


def lora_expand_triton(
    u: torch.Tensor,
    table: SiteTable,
    plan: SegmentPlan,
    first_entry: int,
    columns: SiteColumns,
    cell: int,
    y: torch.Tensor,
) -> torch.Tensor:
    """`kernels.lora_expand.lora_expand` in Triton: same arguments, same result to fp32 rounding
    before the one rounding to y's dtype.

    The grid depends on the plan's capacity and the site's columns only, so a captured launch serves
    every later step. Nothing is allocated and nothing waits for the device.
    """
    column_blocks = sum(triton.cdiv(num_cols, BLOCK_N) for _, num_cols in columns.spans)
    grid = (min(TILE_PROGRAMS, plan.tiles.shape[0]), column_blocks)
    if 0 in grid:
        return y
    launch: Any = expand_kernel[grid]
    launch(
        u,
        table.arena,
        table.b_off,
        table.rank,
        table.g_off,
        table.c_off,
        columns.device_spans,
        plan.tiles,
        plan.num_tiles,
        y,
        first_entry,
        cell,
        table.b_off.shape[1],
        table.b_off.shape[2],
        table.g_off.shape[1],
        u.stride(0),
        u.stride(1),
        y.stride(0),
        NUM_SLICES=columns.num_slices,
        BLOCK_N=BLOCK_N,
        TILE_ROWS=TILE_ROWS,
        RANK_BLOCK=RANK_BLOCK,
        OFFSET_UNIT=OFFSET_UNIT,
        ALIGNED=all(col0 % 16 == num_cols % 16 == 0 for col0, num_cols in columns.spans),
        num_warps=NUM_WARPS,
    )
    return y
