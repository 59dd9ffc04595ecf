"""Shrink on the GPU: kernels.lora_shrink as one launch for all slices of a site."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lora_tables import OFFSET_UNIT, RANK_BLOCK, TILE_ROWS, SegmentPlan, SiteTable

#: grid: programs that walk the tiles, and programs that walk the rank blocks of one tile and slice.
#: First values, not tuned.
TILE_PROGRAMS = 64
BLOCK_PROGRAMS = 4
#: bytes of one row of A that a program reads at once
BLOCK_BYTES = 512
NUM_WARPS = 4
NUM_STAGES = 3


@triton.jit(do_not_specialize=["first_entry"])  # type: ignore[untyped-decorator]
def shrink_kernel(  # type: ignore[no-untyped-def]
    x,
    arena,
    a_off,
    rank_of,
    scale_of,
    tiles,
    num_tiles,
    out,
    first_entry,
    num_entries,
    num_blocks,
    x_stride,
    out_row_stride,
    out_slice_stride,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    CAST: tl.constexpr,
):
    """Program (p, q, j): tiles p, p + P, …; rank blocks q, q + Q, … of slice j."""
    slice_index = tl.program_id(2)
    rows = tl.arange(0, TILE_ROWS)
    ranks = tl.arange(0, RANK_BLOCK)
    columns = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tl.load(num_tiles), tl.num_programs(0)):
        slot = tl.load(tiles + 3 * tile).to(tl.int64)
        first_row = tl.load(tiles + 3 * tile + 1).to(tl.int64)
        live_rows = rows < tl.load(tiles + 3 * tile + 2)
        entry = slot * num_entries + first_entry + slice_index
        rank = tl.load(rank_of + entry)
        x_rows = x + (first_row + rows)[None, :] * x_stride
        for block in range(tl.program_id(1), tl.cdiv(rank, RANK_BLOCK), tl.num_programs(1)):
            live_ranks = block * RANK_BLOCK + ranks < rank
            offset = tl.load(a_off + entry * num_blocks + block) * OFFSET_UNIT
            a = (arena + offset).to(tl.pointer_type(x.dtype.element_ty))
            a_rows = tl.multiple_of(a, 16) + ranks[:, None].to(tl.int64) * K
            # [rank, row]: A is the left operand, as it lies
            total = tl.zeros((RANK_BLOCK, TILE_ROWS), dtype=tl.float32)
            for k0 in range(0, K, BLOCK_K):
                live_k = k0 + columns < K
                a_tile = tl.load(
                    a_rows + (k0 + columns)[None, :],
                    mask=live_ranks[:, None] & live_k[None, :],
                    other=0.0,
                )
                x_tile = tl.load(
                    x_rows + (k0 + columns)[:, None],
                    mask=live_k[:, None] & live_rows[None, :],
                    other=0.0,
                )
                if CAST:
                    a_tile, x_tile = a_tile.to(tl.float32), x_tile.to(tl.float32)
                total = tl.dot(a_tile, x_tile, total, input_precision="tf32x3")
            total = total * tl.load(scale_of + entry)
            target = out + (first_row + rows)[None, :] * out_row_stride
            target += slice_index * out_slice_stride + block * RANK_BLOCK + ranks[:, None]
            tl.store(target, total, mask=live_ranks[:, None] & live_rows[None, :])


def lora_shrink_triton(
    x: torch.Tensor,
    table: SiteTable,
    plan: SegmentPlan,
    first_entry: int,
    num_slices: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kernels.lora_shrink.lora_shrink` in Triton: same arguments, same result to fp32 rounding.

    The grid depends on the plan's capacity and the table's shape only, so a captured launch serves
    every later step. Nothing is allocated and nothing waits for the device.
    """
    grid = (
        min(TILE_PROGRAMS, plan.tiles.shape[0]),
        min(BLOCK_PROGRAMS, table.a_off.shape[2]),
        num_slices,
    )
    if 0 in grid:
        return out
    launch: Any = shrink_kernel[grid]
    launch(
        x,
        table.arena,
        table.a_off,
        table.rank,
        table.scale,
        plan.tiles,
        plan.num_tiles,
        out,
        first_entry,
        table.a_off.shape[1],
        table.a_off.shape[2],
        x.stride(0),
        out.stride(0),
        out.stride(1),
        K=x.shape[1],
        BLOCK_K=BLOCK_BYTES // x.element_size(),
        TILE_ROWS=TILE_ROWS,
        RANK_BLOCK=RANK_BLOCK,
        OFFSET_UNIT=OFFSET_UNIT,
        # the interpreter's bf16 dot is wrong
        CAST=x.device.type == "cpu",
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return out
