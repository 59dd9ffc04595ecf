"""Shrink of long segments (prefill), on tensor cores: PREFILL_TILE_ROWS rows a tile.

The grid may depend on the plan's capacity: a captured step has the largest of its size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lora_launch import TABLE_NUMBERS, cast_for_dot, num_programs
from kernels.lora_tables import (
    OFFSET_UNIT,
    PREFILL_TILE_ROWS,
    RANK_BLOCK,
    SegmentPlan,
    SiteTable,
)
from kernels.lora_tuning import ShrinkTuning


@triton.jit(do_not_specialize=TABLE_NUMBERS)  # type: ignore[untyped-decorator]
def prefill_shrink_kernel(  # type: ignore[no-untyped-def]
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
    x_stride,
    u_split_stride,
    u_row_stride,
    u_slice_stride,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    CAST: tl.constexpr,
):
    """Program (p, s): tiles p, p + P, …, all slices; part s of K.

    The rank blocks of all slices stand side by side, BLOCK_R of their rows in one product, so that
    x is read once for most adapters.
    """
    dtype = x.dtype.element_ty
    rows = tl.arange(0, TILE_ROWS)
    columns = tl.arange(0, BLOCK_K)
    lines = tl.arange(0, BLOCK_R)
    split = tl.program_id(1)
    for tile in range(tl.program_id(0), tl.load(num_tiles), tl.num_programs(0)):
        slot = tl.load(tiles + 3 * tile).to(tl.int64)
        first_row = tl.load(tiles + 3 * tile + 1).to(tl.int64)
        live_rows = rows < tl.load(tiles + 3 * tile + 2)
        first = slot * num_entries + first_entry
        num_lines = 0
        for j in tl.static_range(NUM_SLICES):
            num_lines += tl.cdiv(tl.load(rank_of + first + j), RANK_BLOCK) * RANK_BLOCK
        x_rows = x + (first_row + rows)[:, None] * x_stride
        for line0 in range(0, num_lines, BLOCK_R):
            # line → (slice, its rank)
            line = line0 + lines
            slice_index = tl.zeros((BLOCK_R,), dtype=tl.int32)
            rank_index = line
            before = 0
            for j in tl.static_range(NUM_SLICES):
                here = tl.cdiv(tl.load(rank_of + first + j), RANK_BLOCK) * RANK_BLOCK
                inside = (line >= before) & (line < before + here)
                slice_index = tl.where(inside, j, slice_index)
                rank_index = tl.where(inside, line - before, rank_index)
                before += here
            entry = first + slice_index
            live = line < num_lines
            live = live & (rank_index < tl.load(rank_of + entry, mask=live, other=0))
            offset = tl.load(
                a_off + entry * num_blocks + rank_index // RANK_BLOCK, mask=live, other=0
            )
            a = arena + offset * OFFSET_UNIT
            a = tl.multiple_of(a.to(tl.pointer_type(dtype)), 16)
            a += (rank_index % RANK_BLOCK).to(tl.int64) * K
            if K % 8 == 0:
                # 16 bytes; rows of other lengths begin anywhere
                a = tl.multiple_of(a, 16)
            totals = tl.zeros((TILE_ROWS, BLOCK_R), dtype=tl.float32)
            for part in range(0, SPLIT_K, BLOCK_K):
                k = split * SPLIT_K + part + columns
                x_tile = tl.load(
                    x_rows + k[None, :], mask=live_rows[:, None] & (k < K)[None, :], other=0.0
                )
                a_tile = tl.load(
                    a[None, :] + k[:, None], mask=live[None, :] & (k < K)[:, None], other=0.0
                )
                if CAST:
                    x_tile, a_tile = x_tile.to(tl.float32), a_tile.to(tl.float32)
                totals = tl.dot(x_tile, a_tile, totals, input_precision="tf32x3")
            totals = totals * tl.load(scale_of + entry, mask=live, other=0.0)[None, :]
            target = u + split * u_split_stride + (first_row + rows)[:, None] * u_row_stride
            tl.store(
                target + (slice_index * u_slice_stride + rank_index)[None, :],
                totals,
                mask=live_rows[:, None] & live[None, :],
            )


def launch_prefill_shrink(
    x: torch.Tensor,
    table: SiteTable,
    plan: SegmentPlan,
    first_entry: int,
    num_slices: int,
    u: torch.Tensor,
    tuning: ShrinkTuning,
) -> None:
    """See lora_shrink_triton."""
    grid = (min(num_programs(x, tuning.programs), plan.tiles.shape[0]), u.shape[0])
    launch: Any = prefill_shrink_kernel[grid]
    launch(
        x,
        table.arena,
        table.a_off,
        table.rank,
        table.scale,
        plan.tiles,
        plan.num_tiles,
        u,
        first_entry,
        table.a_off.shape[1],
        table.a_off.shape[2],
        x.stride(0),
        u.stride(0),
        u.stride(1),
        u.stride(2),
        K=x.shape[1],
        SPLIT_K=tuning.split_k,
        BLOCK_K=tuning.block_k * 2 // x.element_size(),
        BLOCK_R=tuning.block_ranks,
        NUM_SLICES=num_slices,
        TILE_ROWS=PREFILL_TILE_ROWS,
        RANK_BLOCK=RANK_BLOCK,
        OFFSET_UNIT=OFFSET_UNIT,
        CAST=cast_for_dot(x),
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.registers,
    )
