"""Delta on the GPU: kernels.lora_delta as one launch for all slices of a site."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.lora_launch import (
    TABLE_NUMBERS,
    cast_for_dot,
    grid,
    overlaps,
)
from kernels.lora_tables import (
    OFFSET_UNIT,
    PREFILL_TILE_ROWS,
    RANK_BLOCK,
    SegmentPlan,
    SiteColumns,
    SiteTable,
)
from kernels.lora_tuning import DeltaTuning, delta_tuning
from kernels.lora_work import index, share, tile_at

#: ranks of one product of several rows where an adapter has more than one block
WIDE_RANKS = 32


@triton.jit  # type: ignore[untyped-decorator]
def column_block(  # type: ignore[no-untyped-def]
    spans, index, NUM_SLICES: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr
):
    """(slice, its first column in the site, its columns, first column inside it) of the index-th
    block of columns of a site."""
    slice_index, col0, num_cols, start, first = 0, 0, 0, 0, 0
    for i in tl.static_range(NUM_SLICES):
        first_column, size = tl.load(spans + 2 * i), tl.load(spans + 2 * i + 1)
        if ALIGNED:
            # here, not at the caller: a hint on what a function returns is lost
            first_column, size = tl.multiple_of(first_column, 16), tl.multiple_of(size, 16)
        here = first + tl.cdiv(size, BLOCK_N)
        inside = (index >= first) & (index < here)
        slice_index = tl.where(inside, i, slice_index)
        col0 = tl.where(inside, first_column, col0)
        num_cols = tl.where(inside, size, num_cols)
        start = tl.where(inside, (index - first) * BLOCK_N, start)
        first = here
    return slice_index, col0, num_cols, start


@triton.jit  # type: ignore[untyped-decorator]
def constant_part(c, offset, columns, num_cols, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """[WIDTH] fp32 of an adapter's constant; zeros where it has none (offset −1)."""
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    if offset >= 0:
        total = tl.load(c + columns, mask=columns < num_cols, other=0.0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def one_row_delta(  # type: ignore[no-untyped-def]
    total,
    u_row,
    arena,
    b_offs,
    b_offset,
    num_blocks,
    rank,
    num_cols,
    columns,
    u_split_stride,
    dtype: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_POWER: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """total [columns] + B·u of one row, without tensor cores: each thread sums all ranks of its
    columns."""
    ranks = tl.arange(0, RANK_BLOCK)
    splits = tl.arange(0, SPLITS_POWER)
    for block in range(tl.cdiv(rank, RANK_BLOCK)):
        live_ranks = block * RANK_BLOCK + ranks < rank
        b = (arena + b_offset * OFFSET_UNIT).to(tl.pointer_type(dtype))
        b_offset = tl.load(b_offs + tl.minimum(block + 1, num_blocks - 1))
        b_tile = tl.load(
            tl.multiple_of(b, 16) + ranks[:, None].to(tl.int64) * num_cols + columns[None, :],
            mask=live_ranks[:, None] & (columns < num_cols)[None, :],
            other=0.0,
        )
        if PDL:
            gdc_wait()
        parts = tl.load(
            u_row + splits[:, None] * u_split_stride + (block * RANK_BLOCK + ranks)[None, :],
            mask=(splits < NUM_SPLITS)[:, None] & live_ranks[None, :],
            other=0.0,
        )
        v = tl.sum(parts, axis=0).to(dtype).to(tl.float32)
        total += tl.sum(v[:, None] * b_tile.to(tl.float32), axis=0)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def summed(  # type: ignore[no-untyped-def]
    u_rows,
    live_rows,
    ranks,
    live_ranks,
    u_split_stride,
    NUM_SPLITS: tl.constexpr,
    SPLITS_POWER: tl.constexpr,
):
    """[rows, ranks] sums of all parts of u, read by one load: added one by one, each part would
    pass through shared memory alone, one after the other."""
    splits = tl.arange(0, SPLITS_POWER)
    live = (splits < NUM_SPLITS)[:, None, None] & live_rows[None, :, None]
    parts = tl.load(
        u_rows[None, :, :] + (splits * u_split_stride)[:, None, None] + ranks[None, None, :],
        mask=live & live_ranks[None, None, :],
        other=0.0,
    )
    return tl.sum(parts, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def many_rows_delta(  # type: ignore[no-untyped-def]
    totals,
    u_rows,
    live_rows,
    arena,
    b_offs,
    rank,
    num_cols,
    columns,
    u_split_stride,
    dtype: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_POWER: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    CAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """totals [rows, columns] + B·u of the rows of one tile, RANKS ranks (some blocks) at once.
    u_rows: [rows, 1] pointers."""
    for first in range(0, rank, RANKS):
        ranks = first + tl.arange(0, RANKS)
        live_ranks = ranks < rank
        if RANKS == RANK_BLOCK:
            b = (arena + tl.load(b_offs + first // RANK_BLOCK) * OFFSET_UNIT).to(
                tl.pointer_type(dtype)
            )
            b_rows = tl.multiple_of(b, 16) + (ranks - first)[:, None].to(tl.int64) * num_cols
        else:
            offsets = tl.load(b_offs + ranks // RANK_BLOCK, mask=live_ranks, other=0)
            b = tl.multiple_of((arena + offsets * OFFSET_UNIT).to(tl.pointer_type(dtype)), 16)
            b_rows = (b + (ranks % RANK_BLOCK).to(tl.int64) * num_cols)[:, None]
        b_tile = tl.load(
            b_rows + columns[None, :],
            mask=live_ranks[:, None] & (columns < num_cols)[None, :],
            other=0.0,
        )
        if PDL:
            gdc_wait()
        v = summed(
            u_rows, live_rows, ranks, live_ranks, u_split_stride, NUM_SPLITS, SPLITS_POWER
        ).to(dtype)
        if CAST:
            v, b_tile = v.to(tl.float32), b_tile.to(tl.float32)
        totals = tl.dot(v, b_tile, totals, input_precision="tf32x3")
    return totals


@triton.jit(do_not_specialize=TABLE_NUMBERS)  # type: ignore[untyped-decorator]
def delta_kernel(  # type: ignore[no-untyped-def]
    u,
    arena,
    b_off,
    rank_of,
    live_at,
    c_off,
    spans,
    tiles,
    num_tiles,
    delta,
    first_entry,
    cell,
    num_entries,
    num_blocks,
    num_cells,
    capacity,
    few_rows,
    stride,
    u_split_stride,
    u_row_stride,
    u_slice_stride,
    delta_stride,
    COLUMN_BLOCKS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_POWER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_N: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    WIDE_RANKS: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Items (tile, block of columns), spread over the programs; see kernels.lora_work.share.

    Lane q takes parts q, q + lanes, … of DOT_N columns of a tile of many rows; of few rows, up to
    few_rows, those rows, with all columns. What does not depend on the kernel before (table, B) is
    read before waiting for it.
    """
    dtype: tl.constexpr = delta.dtype.element_ty
    rows = tl.arange(0, TILE_ROWS)
    next_slot, next_row, next_count = tile_at(tiles, index(stride) // COLUMN_BLOCKS, capacity)
    first_item, end, lane, lanes = share(
        tl.load(num_tiles) * COLUMN_BLOCKS, stride, BLOCK_N // DOT_N
    )
    if lane > 0:
        next_slot, next_row, next_count = tile_at(tiles, first_item // COLUMN_BLOCKS, capacity)
    for item in range(first_item, end, tl.num_programs(0)):
        slot, first_row, num_rows = next_slot.to(tl.int64), next_row.to(tl.int64), next_count
        slice_index, col0, num_cols, start = column_block(
            spans, item % COLUMN_BLOCKS, NUM_SLICES, BLOCK_N, ALIGNED
        )
        entry = slot * num_entries + first_entry + slice_index
        is_live = tl.load(live_at + slot * num_cells + cell)
        constant = tl.load(c_off + slot * num_cells + cell)
        rank = tl.load(rank_of + entry)
        b_offs = b_off + entry * num_blocks
        b_offset = tl.load(b_offs)
        next_slot, next_row, next_count = tile_at(
            tiles, (item + tl.num_programs(0)) // COLUMN_BLOCKS, capacity
        )
        c = (arena + constant * OFFSET_UNIT).to(tl.pointer_type(tl.float32)) + col0
        u_row = u + first_row * u_row_stride + slice_index * u_slice_stride
        out = delta + first_row * delta_stride + col0
        if is_live != 0:
            if num_rows <= few_rows:
                for row in range(lane, num_rows, lanes):
                    columns = start + tl.arange(0, BLOCK_N)
                    total = constant_part(c, constant, columns, num_cols, BLOCK_N)
                    total = one_row_delta(
                        total,
                        u_row + row * u_row_stride,
                        arena,
                        b_offs,
                        b_offset,
                        num_blocks,
                        rank,
                        num_cols,
                        columns,
                        u_split_stride,
                        dtype,
                        NUM_SPLITS,
                        SPLITS_POWER,
                        RANK_BLOCK,
                        OFFSET_UNIT,
                        PDL,
                    )
                    if PDL:
                        gdc_wait()  # where there is a constant alone, nothing has waited yet
                    tl.store(
                        out + row * delta_stride + columns,
                        total.to(dtype),
                        mask=columns < num_cols,
                    )
            else:
                live_rows = rows < num_rows
                u_rows = u_row + rows[:, None] * u_row_stride
                for part in range(lane * DOT_N, BLOCK_N, lanes * DOT_N):
                    columns = start + part + tl.arange(0, DOT_N)
                    totals = tl.zeros((TILE_ROWS, DOT_N), dtype=tl.float32)
                    totals += constant_part(c, constant, columns, num_cols, DOT_N)[None, :]
                    if rank <= RANK_BLOCK:
                        totals = many_rows_delta(
                            totals,
                            u_rows,
                            live_rows,
                            arena,
                            b_offs,
                            rank,
                            num_cols,
                            columns,
                            u_split_stride,
                            dtype,
                            NUM_SPLITS,
                            SPLITS_POWER,
                            RANK_BLOCK,
                            RANK_BLOCK,
                            OFFSET_UNIT,
                            CAST,
                            PDL,
                        )
                    else:
                        totals = many_rows_delta(
                            totals,
                            u_rows,
                            live_rows,
                            arena,
                            b_offs,
                            rank,
                            num_cols,
                            columns,
                            u_split_stride,
                            dtype,
                            NUM_SPLITS,
                            SPLITS_POWER,
                            RANK_BLOCK,
                            WIDE_RANKS,
                            OFFSET_UNIT,
                            CAST,
                            PDL,
                        )
                    if PDL:
                        gdc_wait()
                    tl.store(
                        out + rows[:, None] * delta_stride + columns[None, :],
                        totals.to(dtype),
                        mask=live_rows[:, None] & (columns < num_cols)[None, :],
                    )
    if PDL and tl.program_id(0) == 0:
        gdc_wait()  # the kernel as a whole ends after the shrink, whatever its work


def lora_delta_triton(
    u: torch.Tensor,
    table: SiteTable,
    plan: SegmentPlan,
    first_entry: int,
    columns: SiteColumns,
    cell: int,
    delta: torch.Tensor,
    tuning: DeltaTuning | None = None,
) -> torch.Tensor:
    """`kernels.lora_delta.lora_delta` in Triton: same arguments, same result to fp32 rounding
    before each of its two roundings.

    The grid depends on the site's columns only, so a captured launch serves every later step.
    Nothing is allocated and nothing waits for the device.
    """
    if not delta.numel():
        return delta
    tuning = tuning or delta_tuning(delta.shape[1], plan.tile_rows)
    if plan.tile_rows == PREFILL_TILE_ROWS:
        from kernels.lora_prefill_triton import launch_prefill_delta

        launch_prefill_delta(u, table, plan, first_entry, columns, cell, delta, tuning)
        return delta
    early = tuning.early and overlaps(delta)
    blocks = columns.num_blocks(tuning.block_columns)
    lanes = tuning.block_columns // tuning.dot_columns
    # a tile has one row at least, so more than this are never busy at once
    most = delta.shape[0] * blocks * (lanes if delta.shape[0] > 1 else 1)
    programs, stride = grid(delta, tuning.programs, most, tuning.packed)
    launch: Any = delta_kernel[(programs,)]
    launch(
        u,
        table.arena,
        table.b_off,
        table.rank,
        table.live,
        table.c_off,
        columns.device_spans,
        plan.tiles,
        plan.num_tiles,
        delta,
        first_entry,
        cell,
        table.b_off.shape[1],
        table.b_off.shape[2],
        table.c_off.shape[1],
        plan.tiles.shape[0],
        tuning.few_rows,
        stride,
        u.stride(0),
        u.stride(1),
        u.stride(2),
        delta.stride(0),
        COLUMN_BLOCKS=blocks,
        NUM_SLICES=columns.num_slices,
        NUM_SPLITS=u.shape[0],
        SPLITS_POWER=triton.next_power_of_2(u.shape[0]),
        BLOCK_N=tuning.block_columns,
        DOT_N=tuning.dot_columns,
        TILE_ROWS=plan.tile_rows,
        RANK_BLOCK=RANK_BLOCK,
        WIDE_RANKS=WIDE_RANKS,
        OFFSET_UNIT=OFFSET_UNIT,
        ALIGNED=columns.aligned,
        CAST=cast_for_dot(delta),
        PDL=early,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.registers,
        launch_pdl=early,
    )
    return delta
