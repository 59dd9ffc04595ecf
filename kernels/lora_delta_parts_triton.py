"""What the delta kernels compute for one item of their work: device functions, no launches."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.lora_work import kept

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
        b_offset = kept(b_offs + tl.minimum(block + 1, num_blocks - 1))
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
def store_one_block_delta(  # type: ignore[no-untyped-def]
    out,
    delta_stride,
    u_rows,
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
    dtype: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLITS_POWER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_N: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    CAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Stores this lane's parts of the constant + B·u of one tile's rows, for an adapter of one
    block of ranks: B of all parts is on its way at once, and u is summed once for all.
    u_rows: [rows, 1] pointers."""
    PARTS: tl.constexpr = BLOCK_N // DOT_N
    rows = tl.arange(0, TILE_ROWS)
    live_rows = rows < num_rows
    ranks = tl.arange(0, RANK_BLOCK)
    live_ranks = ranks < rank
    b = (arena + b_offset * OFFSET_UNIT).to(tl.pointer_type(dtype))
    b_rows = tl.multiple_of(b, 16) + ranks[:, None].to(tl.int64) * num_cols
    b_tiles = ()
    for i in tl.static_range(PARTS):
        columns = start + (lane + i * lanes) * DOT_N + tl.arange(0, DOT_N)
        live = live_ranks & (lane + i * lanes < PARTS)
        b_tile = tl.load(
            b_rows + columns[None, :],
            mask=live[:, None] & (columns < num_cols)[None, :],
            other=0.0,
        )
        b_tiles = b_tiles + (b_tile,)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        gdc_wait()
    v = summed(u_rows, live_rows, ranks, live_ranks, u_split_stride, NUM_SPLITS, SPLITS_POWER).to(
        dtype
    )
    if CAST:
        v = v.to(tl.float32)
    for i in tl.static_range(PARTS):
        if lane + i * lanes < PARTS:
            columns = start + (lane + i * lanes) * DOT_N + tl.arange(0, DOT_N)
            totals = tl.zeros((TILE_ROWS, DOT_N), dtype=tl.float32)
            totals += constant_part(c, constant, columns, num_cols, DOT_N)[None, :]
            if CAST:
                totals = tl.dot(v, b_tiles[i].to(tl.float32), totals, input_precision="tf32x3")
            else:
                totals = tl.dot(v, b_tiles[i], totals, input_precision="tf32x3")
            tl.store(
                out + rows[:, None] * delta_stride + columns[None, :],
                totals.to(dtype),
                mask=live_rows[:, None] & (columns < num_cols)[None, :],
            )


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
    """totals [rows, columns] + B·u of the rows of one tile, RANKS ranks (several blocks) at once.
    u_rows: [rows, 1] pointers."""
    for first in range(0, rank, RANKS):
        ranks = first + tl.arange(0, RANKS)
        live_ranks = ranks < rank
        offsets = tl.load(
            b_offs + ranks // RANK_BLOCK, mask=live_ranks, other=0, eviction_policy="evict_last"
        )
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
