"""Shrink on the GPU: kernels.lora_shrink as one launch for all slices of a site."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.lora_launch import (
    TABLE_NUMBERS,
    cast_for_dot,
    num_programs,
    overlaps,
)
from kernels.lora_prefill_shrink_triton import launch_prefill_shrink
from kernels.lora_tables import OFFSET_UNIT, PREFILL_TILE_ROWS, RANK_BLOCK, SegmentPlan, SiteTable
from kernels.lora_tuning import ShrinkTuning, shrink_tuning
from kernels.lora_work import kept, shrink_tile_at

#: blocks of A of one row that are read before any is multiplied
AT_ONCE = tl.constexpr(4)


@triton.jit  # type: ignore[untyped-decorator]
def one_row_partial(  # type: ignore[no-untyped-def]
    x_row,
    a,
    live_ranks,
    k0,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """[RANK_BLOCK] sums over k0 … k0 + SPLIT_K − 1, without tensor cores; AT_ONCE blocks are
    unrolled, so that their loads are on their way together."""
    totals = tl.zeros((RANK_BLOCK, BLOCK_K), dtype=tl.float32)
    a_rows = a + tl.arange(0, RANK_BLOCK)[:, None].to(tl.int64) * K
    for first in range(0, SPLIT_K, AT_ONCE * BLOCK_K):
        for part in tl.static_range(AT_ONCE):
            at = first + part * BLOCK_K + tl.arange(0, BLOCK_K)
            k = k0 + at
            if K % SPLIT_K == 0 and SPLIT_K % (AT_ONCE * BLOCK_K) == 0:
                a_tile = tl.load(a_rows + k[None, :], mask=live_ranks[:, None], other=0.0)
                if PDL and part == 0:
                    gdc_wait()
                x_part = tl.load(x_row + k)
            else:
                live = (k < K) & (at < SPLIT_K)
                a_tile = tl.load(
                    a_rows + k[None, :], mask=live_ranks[:, None] & live[None, :], other=0.0
                )
                if PDL and part == 0:
                    gdc_wait()
                x_part = tl.load(x_row + k, mask=live, other=0.0)
            totals += a_tile.to(tl.float32) * x_part.to(tl.float32)[None, :]
    return tl.sum(totals, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def many_rows_partial(  # type: ignore[no-untyped-def]
    x_rows,
    a,
    live_rows,
    live_ranks,
    k0,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DOT_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    CAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """[TILE_ROWS, RANK_BLOCK] sums over k0 … k0 + SPLIT_K − 1, DOT_K at once, STAGES of them on
    their way."""
    totals = tl.zeros((TILE_ROWS, RANK_BLOCK), dtype=tl.float32)
    a_columns = a + tl.arange(0, RANK_BLOCK)[None, :].to(tl.int64) * K
    if PDL:
        gdc_wait()
    for part in tl.range(0, SPLIT_K, DOT_K, num_stages=STAGES):
        k = k0 + part + tl.arange(0, DOT_K)
        live_a, live_x = live_ranks[None, :], live_rows[:, None]
        if K % SPLIT_K:
            live_a = live_a & (k < K)[:, None]
            live_x = live_x & (k < K)[None, :]
        x_tile = tl.load(x_rows + k[None, :], mask=live_x, other=0.0)
        a_tile = tl.load(a_columns + k[:, None], mask=live_a, other=0.0)
        if CAST:
            x_tile, a_tile = x_tile.to(tl.float32), a_tile.to(tl.float32)
        totals = tl.dot(x_tile, a_tile, totals, input_precision="tf32x3")
    return totals


@triton.jit(do_not_specialize=TABLE_NUMBERS)  # type: ignore[untyped-decorator]
def shrink_kernel(  # type: ignore[no-untyped-def]
    x,
    arena,
    a_off,
    rank_of,
    scale_of,
    tiles,
    num_tiles,
    u,
    first_entry,
    num_entries,
    num_blocks,
    capacity,
    few_rows,
    x_stride,
    u_split_stride,
    u_row_stride,
    u_slice_stride,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_K: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    STAGES: tl.constexpr,
    CAST: tl.constexpr,
    PDL: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Items (tile, rank block, slice, split); program p takes p, p + P, … of them.

    What does not depend on the kernel before (table, A) is read before waiting for it.
    """
    if LEADS:
        gdc_launch_dependents()
    NUM_SPLITS: tl.constexpr = (K + SPLIT_K - 1) // SPLIT_K
    ITEMS: tl.constexpr = NUM_SLICES * NUM_SPLITS
    rows = tl.arange(0, TILE_ROWS)
    ranks = tl.arange(0, RANK_BLOCK)
    place = tl.program_id(0)
    next_slot, next_row, next_count, next_block = shrink_tile_at(tiles, place // ITEMS, capacity)
    for item in range(place, kept(num_tiles) * ITEMS, tl.num_programs(0)):
        slot, first_row, num_rows = next_slot.to(tl.int64), next_row.to(tl.int64), next_count
        block = next_block
        split = item % NUM_SPLITS
        slice_index = item // NUM_SPLITS % NUM_SLICES
        entry = slot * num_entries + first_entry + slice_index
        rank = kept(rank_of + entry)
        scale = kept(scale_of + entry)
        offset = kept(a_off + entry * num_blocks + block)
        next_slot, next_row, next_count, next_block = shrink_tile_at(
            tiles, (item + tl.num_programs(0)) // ITEMS, capacity
        )
        live_ranks = block * RANK_BLOCK + ranks < rank
        if block * RANK_BLOCK < rank:
            a = (arena + offset * OFFSET_UNIT).to(tl.pointer_type(x.dtype.element_ty))
            a = tl.multiple_of(a, 16)
            x_row = x + first_row * x_stride
            k0 = split * SPLIT_K
            out = u + first_row * u_row_stride + slice_index * u_slice_stride
            out += split * u_split_stride + block * RANK_BLOCK
            if num_rows <= few_rows:
                for row in range(num_rows):
                    total = one_row_partial(
                        x_row + row * x_stride,
                        a,
                        live_ranks,
                        k0,
                        K,
                        SPLIT_K,
                        BLOCK_K,
                        RANK_BLOCK,
                        PDL,
                    )
                    tl.store(out + row * u_row_stride + ranks, total * scale, mask=live_ranks)
            else:
                live_rows = rows < num_rows
                totals = many_rows_partial(
                    x_row + rows[:, None] * x_stride,
                    a,
                    live_rows,
                    live_ranks,
                    k0,
                    K,
                    SPLIT_K,
                    DOT_K,
                    TILE_ROWS,
                    RANK_BLOCK,
                    STAGES,
                    CAST,
                    PDL,
                )
                tl.store(
                    out + rows[:, None] * u_row_stride + ranks[None, :],
                    totals * scale,
                    mask=live_rows[:, None] & live_ranks[None, :],
                )
    if PDL and tl.program_id(0) == 0:
        gdc_wait()  # the kernel as a whole ends after the one before, whatever its work


def lora_shrink_triton(
    x: torch.Tensor,
    table: SiteTable,
    plan: SegmentPlan,
    first_entry: int,
    num_slices: int,
    u: torch.Tensor,
    tuning: ShrinkTuning | None = None,
) -> torch.Tensor:
    """`kernels.lora_shrink.lora_shrink` in Triton: same arguments, partials that add up to the same
    sum to fp32 rounding.

    The grid depends on the site's shape only, so a captured launch serves every later step. Nothing
    is allocated and nothing waits for the device.
    """
    in_features = x.shape[1]
    tuning = tuning or shrink_tuning(in_features, plan.tile_rows)
    if u.shape[0] != triton.cdiv(in_features, tuning.split_k):
        raise ValueError(
            f"u has {u.shape[0]} partials; {in_features} inputs by {tuning.split_k} are "
            f"{triton.cdiv(in_features, tuning.split_k)}"
        )
    if u.numel() >= 2**31:
        raise ValueError(f"u has {u.numel()} numbers; the limit is 2**31 - 1")
    if not u.numel():
        return u
    if plan.tile_rows == PREFILL_TILE_ROWS:
        launch_prefill_shrink(x, table, plan, first_entry, num_slices, u, tuning)
        return u
    early = tuning.early and overlaps(x)
    # a tile has one row at least, so more than this are never busy at once
    most = x.shape[0] * table.a_off.shape[2] * num_slices * u.shape[0]
    launch: Any = shrink_kernel[(num_programs(x, min(tuning.programs, most)),)]
    launch(
        x,
        table.arena,
        table.a_off,
        table.rank,
        table.scale,
        plan.shrink_tiles,
        plan.num_shrink_tiles,
        u,
        first_entry,
        table.a_off.shape[1],
        table.a_off.shape[2],
        plan.shrink_tiles.shape[0],
        tuning.few_rows,
        x.stride(0),
        u.stride(0),
        u.stride(1),
        u.stride(2),
        K=in_features,
        SPLIT_K=tuning.split_k,
        BLOCK_K=tuning.block_k * 2 // x.element_size(),
        DOT_K=tuning.dot_k * 2 // x.element_size(),
        NUM_SLICES=num_slices,
        TILE_ROWS=plan.tile_rows,
        RANK_BLOCK=RANK_BLOCK,
        OFFSET_UNIT=OFFSET_UNIT,
        STAGES=tuning.num_stages,
        CAST=cast_for_dot(x),
        PDL=early,
        LEADS=tuning.leads and overlaps(x),
        num_warps=tuning.num_warps,
        num_stages=1,
        maxnreg=tuning.registers,
        launch_pdl=early,
    )
    return u
