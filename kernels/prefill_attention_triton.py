"""Prefill attention on the GPU: a tile of rows times the heads of one KV head, on tensor cores."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention_reference import check_shapes
from kernels.attention_tuning import TILE_QUERIES, PrefillTuning, prefill_tuning

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit  # type: ignore[untyped-decorator]
def add_blocks(  # type: ignore[no-untyped-def]
    values,
    total,
    top,
    q_tile,
    keys,
    table,
    own,
    first,
    end,
    dims,
    LAYERS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    CAST: tl.constexpr,
):
    """Positions first … end − 1 join the running softmax. Not MASKED: every row sees all of them,
    and there are whole blocks."""
    POSITION: tl.constexpr = KV_HEADS * DIM
    PLANE: tl.constexpr = PAGE_SIZE * POSITION
    real_dims = dims < DIM
    # of softmax's exponents, to the base 2; one fused operation a score applies it
    scale = 1.4426950408889634 / DIM**0.5
    columns = tl.arange(0, BLOCK_N)
    page = tl.load(table + (first + columns) // PAGE_SIZE, mask=first + columns < end, other=0)
    for n in range(first, end, BLOCK_N):
        position = n + columns
        mask = real_dims[None, :]
        if MASKED:
            mask = (position < end)[:, None] & real_dims[None, :]
        offset = page.to(tl.int64) * (LAYERS * 2 * PLANE) + (position % PAGE_SIZE) * POSITION
        # an iteration ahead, so that no load of keys waits for it
        later = position + BLOCK_N
        page = tl.load(table + later // PAGE_SIZE, mask=later < end, other=0)
        here = keys + offset[:, None] + dims[None, :]
        k = tl.load(here, mask=mask, other=0.0)
        v = tl.load(here + PLANE, mask=mask, other=0.0)
        if CAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q_tile, k.T, input_precision=PRECISION)
        if MASKED:
            seen = position[None, :] <= own[:, None]
            if WINDOW > 0:
                seen = seen & (position[None, :] > own[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = new_top
        if WINDOW > 0:
            # a block may lie before the windows of some rows: −inf must not meet itself
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        share = tl.exp2(scores * scale - (shift * scale)[:, None])
        rescale = tl.exp2((top - shift) * scale)
        total = total * rescale + tl.sum(share, 1)
        values = values * rescale[:, None]
        values = tl.dot(share.to(v.dtype), v, values, input_precision=PRECISION)
        top = new_top
    return values, total, top


@triton.jit(do_not_specialize=["layer"])  # type: ignore[untyped-decorator]
def prefill_kernel(  # type: ignore[no-untyped-def]
    q,
    pages,
    page_table,
    tiles,
    num_tiles,
    out,
    layer,
    table_stride,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    CAST: tl.constexpr,
):
    """Program (kv_head, part, tile): QUERIES of the tile's pairs (row, head), a row's heads
    together."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    POSITION: tl.constexpr = KV_HEADS * DIM
    PLANE: tl.constexpr = PAGE_SIZE * POSITION
    kv_head, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile >= tl.load(num_tiles):
        return
    first_row = tl.load(tiles + 4 * tile).to(tl.int64)
    num_rows = tl.load(tiles + 4 * tile + 1)
    seat = tl.load(tiles + 4 * tile + 2).to(tl.int64)
    start = tl.load(tiles + 4 * tile + 3)
    skipped = part * QUERIES // GROUP
    if skipped >= num_rows:
        return
    query = part * QUERIES + tl.arange(0, QUERIES)
    row = query // GROUP
    end = start + tl.minimum(num_rows, (part * QUERIES + QUERIES - 1) // GROUP + 1)
    dims = tl.arange(0, DIM_BLOCK)
    numbers = (first_row + row)[:, None] * (HEADS * DIM) + (
        (kv_head * GROUP + query % GROUP)[:, None] * DIM + dims[None, :]
    )
    real = (row < num_rows)[:, None] & (dims < DIM)[None, :]
    q_tile = tl.load(q + numbers, mask=real, other=0.0)
    if CAST:
        q_tile = q_tile.to(tl.float32)
    own = start + row
    keys = pages + layer.to(tl.int64) * (2 * PLANE) + kv_head * DIM
    table = page_table + seat * table_stride
    values = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    if WINDOW > 0:
        edge = tl.maximum(start + skipped - WINDOW + 1, 0)
    else:
        edge = (start + skipped + 1) // BLOCK_N * BLOCK_N
        values, total, top = add_blocks(
            values, total, top, q_tile, keys, table, own, 0, edge, dims, LAYERS, KV_HEADS, DIM,
            PAGE_SIZE, BLOCK_N, WINDOW, False, PRECISION, CAST,
        )  # fmt: skip
    values, total, top = add_blocks(
        values, total, top, q_tile, keys, table, own, edge, end, dims, LAYERS, KV_HEADS,
        DIM, PAGE_SIZE, BLOCK_N, WINDOW, True, PRECISION, CAST,
    )  # fmt: skip
    result = values / total[:, None]
    tl.store(out + numbers, result.to(out.dtype.element_ty), mask=real)


def prefill_attention_triton(
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    num_tiles: torch.Tensor,
    layer: int,
    num_kv_heads: int,
    window: int,
    out: torch.Tensor,
    *,
    tuning: PrefillTuning | None = None,
) -> torch.Tensor:
    """`kernels.prefill_attention.prefill_attention` in Triton: same arguments, same result to
    rounding. The grid depends on the capacity of `tiles` and the shapes only."""
    num_rows, num_heads, dim = q.shape
    if tiles.shape[0] == 0:
        return out
    check_shapes(q, pages, num_kv_heads, out)
    tuning = tuning or prefill_tuning(num_rows, dim, q.element_size(), shared_bytes(q.device))
    _, layers, _, page_size, _, _ = pages.shape
    parts = triton.cdiv(TILE_QUERIES, tuning.queries)
    launch: Any = prefill_kernel[(num_kv_heads, parts, tiles.shape[0])]
    launch(
        q,
        pages,
        page_table,
        tiles,
        num_tiles,
        out,
        layer,
        page_table.stride(0),
        **prefill_constants(
            layers, num_heads, num_kv_heads, dim, page_size, window, q.element_size(), tuning
        ),
        CAST=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )
    return out


def prefill_constants(
    layers: int,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    page_size: int,
    window: int,
    item_bytes: int,
    tuning: PrefillTuning,
) -> dict[str, Any]:
    """What prefill_kernel is compiled for, CAST apart."""
    return {
        "LAYERS": layers,
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "DIM": dim,
        "PAGE_SIZE": page_size,
        "DIM_BLOCK": triton.next_power_of_2(dim),
        "QUERIES": tuning.queries,
        "BLOCK_N": tuning.block_n,
        "WINDOW": window,
        "PRECISION": "tf32x3" if item_bytes == 4 and not INTERPRETED else "ieee",
    }


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may take."""
    if device.type != "cuda":
        return 0
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])
