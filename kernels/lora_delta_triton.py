"""Delta on the GPU: kernels.lora_delta as one launch for all slices of a site."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.lora_delta_parts_triton import (
    WIDE_RANKS,
    column_block,
    constant_part,
    many_rows_delta,
    one_row_delta,
    store_one_block_delta,
)
from kernels.lora_launch import (
    TABLE_NUMBERS,
    cast_for_dot,
    num_programs,
    overlaps,
)
from kernels.lora_prefill_delta_triton import launch_prefill_delta
from kernels.lora_tables import (
    OFFSET_UNIT,
    PREFILL_TILE_ROWS,
    RANK_BLOCK,
    SegmentPlan,
    SiteColumns,
    SiteTable,
)
from kernels.lora_tuning import DeltaTuning, delta_tuning
from kernels.lora_work import kept, share, tile_at


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
    next_slot, next_row, next_count = tile_at(tiles, tl.program_id(0) // COLUMN_BLOCKS, capacity)
    first_item, end, lane, lanes = share(kept(num_tiles) * COLUMN_BLOCKS, BLOCK_N // DOT_N)
    if lane > 0:
        next_slot, next_row, next_count = tile_at(tiles, first_item // COLUMN_BLOCKS, capacity)
    for item in range(first_item, end, tl.num_programs(0)):
        slot, first_row, num_rows = next_slot.to(tl.int64), next_row.to(tl.int64), next_count
        slice_index, col0, num_cols, start = column_block(
            spans, item % COLUMN_BLOCKS, NUM_SLICES, BLOCK_N, ALIGNED
        )
        entry = slot * num_entries + first_entry + slice_index
        is_live = kept(live_at + slot * num_cells + cell)
        constant = kept(c_off + slot * num_cells + cell)
        rank = kept(rank_of + entry)
        b_offs = b_off + entry * num_blocks
        b_offset = kept(b_offs)
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
            elif rank <= RANK_BLOCK:
                store_one_block_delta(
                    out,
                    delta_stride,
                    u_row + rows[:, None] * u_row_stride,
                    num_rows,
                    arena,
                    b_offset,
                    rank,
                    c,
                    constant,
                    start,
                    num_cols,
                    lane,
                    lanes,
                    u_split_stride,
                    dtype,
                    NUM_SPLITS,
                    SPLITS_POWER,
                    TILE_ROWS,
                    BLOCK_N,
                    DOT_N,
                    RANK_BLOCK,
                    OFFSET_UNIT,
                    CAST,
                    PDL,
                )
            else:
                live_rows = rows < num_rows
                u_rows = u_row + rows[:, None] * u_row_stride
                for part in range(lane * DOT_N, BLOCK_N, lanes * DOT_N):
                    columns = start + part + tl.arange(0, DOT_N)
                    totals = tl.zeros((TILE_ROWS, DOT_N), dtype=tl.float32)
                    totals += constant_part(c, constant, columns, num_cols, DOT_N)[None, :]
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
    tuning = tuning or delta_tuning(delta.shape[1], plan.tile_rows, u.shape[0])
    if plan.tile_rows == PREFILL_TILE_ROWS:
        launch_prefill_delta(u, table, plan, first_entry, columns, cell, delta, tuning)
        return delta
    early = tuning.early and overlaps(delta)
    blocks = columns.num_blocks(tuning.block_columns)
    lanes = tuning.block_columns // tuning.dot_columns
    # a tile has one row at least, so more than this are never busy at once
    most = delta.shape[0] * blocks * (lanes if delta.shape[0] > 1 else 1)
    launch: Any = delta_kernel[(num_programs(delta, min(tuning.programs, most)),)]
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
