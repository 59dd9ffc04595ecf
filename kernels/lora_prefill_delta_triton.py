"""Delta of long segments (prefill), on tensor cores: PREFILL_TILE_ROWS rows a tile.

The grid may depend on the plan's capacity: a captured step has the largest of its size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lora_delta_parts_triton import (
    WIDE_RANKS,
    column_block,
    constant_part,
    many_rows_delta,
    summed,
)
from kernels.lora_launch import TABLE_NUMBERS, cast_for_dot, num_programs
from kernels.lora_tables import OFFSET_UNIT, RANK_BLOCK, SegmentPlan, SiteColumns, SiteTable
from kernels.lora_tuning import DeltaTuning

#: B of up to so many ranks is held for all rows of a tile, with so many bytes of the output at a
#: time. gate_up, 8192 rows of eight adapters of rank 64, in-layer (H200, 8B shape, commit 2915d69):
#: 1078 µs when B was read for every 16 rows, 654 with 16 rows × 128 columns, 524 with 256
HELD_RANKS, HELD_BYTES = 64, 8192


@triton.jit  # type: ignore[untyped-decorator]
def store_held_delta(  # type: ignore[no-untyped-def]
    out,
    delta_stride,
    u_slice,
    u_row_stride,
    num_rows,
    arena,
    b_offs,
    rank,
    c,
    constant,
    start,
    num_cols,
    u_split_stride,
    dtype: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_POWER: tl.constexpr,
    HELD_N: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HELD_RANKS: tl.constexpr,
    STAGES: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    CAST: tl.constexpr,
):
    """Stores c + B·u of one tile's rows and HELD_N columns, for an adapter of a few rank blocks: B
    is read once for all rows."""
    columns = start + tl.arange(0, HELD_N)
    inside = columns < num_cols
    ranks = tl.arange(0, HELD_RANKS)
    live_ranks = ranks < rank
    offsets = tl.load(b_offs + ranks // RANK_BLOCK, mask=live_ranks, other=0)
    b = tl.multiple_of((arena + offsets * OFFSET_UNIT).to(tl.pointer_type(dtype)), 16)
    b_rows = b + (ranks % RANK_BLOCK).to(tl.int64) * num_cols
    b_tile = tl.load(
        b_rows[:, None] + columns[None, :], mask=live_ranks[:, None] & inside[None, :], other=0.0
    )
    if CAST:
        b_tile = b_tile.to(tl.float32)
    c_tile = constant_part(c, constant, columns, num_cols, HELD_N)
    for row0 in tl.range(0, num_rows, DOT_ROWS, num_stages=STAGES):
        rows = row0 + tl.arange(0, DOT_ROWS)
        live_rows = rows < num_rows
        v = summed(
            u_slice + rows[:, None].to(tl.int64) * u_row_stride,
            live_rows,
            ranks,
            live_ranks,
            u_split_stride,
            NUM_SPLITS,
            SPLITS_POWER,
        ).to(dtype)
        if CAST:
            v = v.to(tl.float32)
        totals = tl.zeros((DOT_ROWS, HELD_N), dtype=tl.float32) + c_tile[None, :]
        totals = tl.dot(v, b_tile, totals, input_precision="tf32x3")
        tl.store(
            out + rows[:, None].to(tl.int64) * delta_stride + columns[None, :],
            totals.to(dtype),
            mask=live_rows[:, None] & inside[None, :],
        )


@triton.jit(do_not_specialize=TABLE_NUMBERS)  # type: ignore[untyped-decorator]
def prefill_delta_kernel(  # type: ignore[no-untyped-def]
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
    u_split_stride,
    u_row_stride,
    u_slice_stride,
    delta_stride,
    COLUMN_BLOCKS: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_POWER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    WIDE_RANKS: tl.constexpr,
    HELD_RANKS: tl.constexpr,
    HELD_N: tl.constexpr,
    STAGES: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    CAST: tl.constexpr,
):
    """Program p: items (tile, block of columns) p, p + P, …; DOT_ROWS rows at a time."""
    dtype: tl.constexpr = delta.dtype.element_ty
    num_items = tl.load(num_tiles) * COLUMN_BLOCKS
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile = tiles + 3 * (item // COLUMN_BLOCKS)
        slot = tl.load(tile).to(tl.int64)
        first_row = tl.load(tile + 1).to(tl.int64)
        num_rows = tl.load(tile + 2)
        slice_index, col0, num_cols, start = column_block(
            spans, item % COLUMN_BLOCKS, NUM_SLICES, BLOCK_N, ALIGNED
        )
        entry = slot * num_entries + first_entry + slice_index
        rank = tl.load(rank_of + entry)
        constant = tl.load(c_off + slot * num_cells + cell)
        columns = start + tl.arange(0, BLOCK_N)
        u_slice = u + first_row * u_row_stride + slice_index * u_slice_stride
        out = delta + first_row * delta_stride + col0
        if tl.load(live_at + slot * num_cells + cell) != 0:
            c = (arena + constant * OFFSET_UNIT).to(tl.pointer_type(tl.float32)) + col0
            if rank <= RANK_BLOCK:
                # most adapters: B is read once for all rows
                c_tile = constant_part(c, constant, columns, num_cols, BLOCK_N)
                ranks = tl.arange(0, RANK_BLOCK)
                b = (arena + tl.load(b_off + entry * num_blocks) * OFFSET_UNIT).to(
                    tl.pointer_type(dtype)
                )
                b_tile = tl.load(
                    tl.multiple_of(b, 16) + ranks[:, None].to(tl.int64) * num_cols + columns[None],
                    mask=(ranks < rank)[:, None] & (columns < num_cols)[None, :],
                    other=0.0,
                )
                if CAST:
                    b_tile = b_tile.to(tl.float32)
                for row0 in tl.range(0, num_rows, DOT_ROWS, num_stages=STAGES):
                    rows = row0 + tl.arange(0, DOT_ROWS)
                    live_rows = rows < num_rows
                    v = summed(
                        u_slice + rows[:, None].to(tl.int64) * u_row_stride,
                        live_rows,
                        ranks,
                        ranks < rank,
                        u_split_stride,
                        NUM_SPLITS,
                        SPLITS_POWER,
                    ).to(dtype)
                    if CAST:
                        v = v.to(tl.float32)
                    totals = tl.zeros((DOT_ROWS, BLOCK_N), dtype=tl.float32) + c_tile[None, :]
                    totals = tl.dot(v, b_tile, totals, input_precision="tf32x3")
                    tl.store(
                        out + rows[:, None].to(tl.int64) * delta_stride + columns[None, :],
                        totals.to(dtype),
                        mask=live_rows[:, None] & (columns < num_cols)[None, :],
                    )
            elif rank <= HELD_RANKS:
                for part in range(0, BLOCK_N, HELD_N):
                    store_held_delta(
                        out,
                        delta_stride,
                        u_slice,
                        u_row_stride,
                        num_rows,
                        arena,
                        b_off + entry * num_blocks,
                        rank,
                        c,
                        constant,
                        start + part,
                        num_cols,
                        u_split_stride,
                        dtype,
                        NUM_SPLITS,
                        SPLITS_POWER,
                        HELD_N,
                        DOT_ROWS,
                        RANK_BLOCK,
                        HELD_RANKS,
                        STAGES,
                        OFFSET_UNIT,
                        CAST,
                    )
            else:
                for part in range(0, BLOCK_N, HELD_N):
                    part_columns = start + part + tl.arange(0, HELD_N)
                    c_part = constant_part(c, constant, part_columns, num_cols, HELD_N)
                    for row0 in range(0, num_rows, DOT_ROWS):
                        rows = row0 + tl.arange(0, DOT_ROWS)
                        live_rows = rows < num_rows
                        totals = tl.zeros((DOT_ROWS, HELD_N), dtype=tl.float32) + c_part[None, :]
                        totals = many_rows_delta(
                            totals,
                            u_slice + rows[:, None].to(tl.int64) * u_row_stride,
                            live_rows,
                            arena,
                            b_off + entry * num_blocks,
                            rank,
                            num_cols,
                            part_columns,
                            u_split_stride,
                            dtype,
                            NUM_SPLITS,
                            SPLITS_POWER,
                            RANK_BLOCK,
                            WIDE_RANKS,
                            OFFSET_UNIT,
                            CAST,
                            False,
                        )
                        tl.store(
                            out + rows[:, None].to(tl.int64) * delta_stride + part_columns[None, :],
                            totals.to(dtype),
                            mask=live_rows[:, None] & (part_columns < num_cols)[None, :],
                        )


def held_columns(tuning: DeltaTuning, item_bytes: int) -> int:
    """Columns for which B is held at a time."""
    return HELD_BYTES // (item_bytes * tuning.dot_rows)


def launch_prefill_delta(
    u: torch.Tensor,
    table: SiteTable,
    plan: SegmentPlan,
    first_entry: int,
    columns: SiteColumns,
    cell: int,
    delta: torch.Tensor,
    tuning: DeltaTuning,
) -> None:
    """See lora_delta_triton."""
    blocks = columns.num_blocks(tuning.block_columns)
    programs = min(num_programs(delta, tuning.programs), plan.tiles.shape[0] * blocks)
    launch: Any = prefill_delta_kernel[(programs,)]
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
        u.stride(0),
        u.stride(1),
        u.stride(2),
        delta.stride(0),
        COLUMN_BLOCKS=blocks,
        NUM_SLICES=columns.num_slices,
        NUM_SPLITS=u.shape[0],
        SPLITS_POWER=triton.next_power_of_2(u.shape[0]),
        BLOCK_N=tuning.block_columns,
        DOT_ROWS=tuning.dot_rows,
        RANK_BLOCK=RANK_BLOCK,
        WIDE_RANKS=WIDE_RANKS,
        HELD_RANKS=HELD_RANKS,
        HELD_N=min(held_columns(tuning, delta.element_size()), tuning.block_columns),
        STAGES=tuning.num_stages,
        OFFSET_UNIT=OFFSET_UNIT,
        ALIGNED=columns.aligned,
        CAST=cast_for_dot(delta),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.registers,
    )
