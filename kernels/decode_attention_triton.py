"""Decode attention on the GPU: split over positions, summed by the part that arrives last."""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kernels.attention_reference import check_shapes
from kernels.attention_tuning import DecodeTuning, decode_tuning
from kernels.decode_attention import DecodeScratch

#: tl.dot's fewest rows
DOT_ROWS = 16
#: numbers of one load when parts are summed
SUM_BLOCK = 4096
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit  # type: ignore[untyped-decorator]
def sum_parts(  # type: ignore[no-untyped-def]
    parts,
    weights,
    out,
    live_splits,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """out[g, d] = Σ_s 2^(weights[s, g] − max) · parts[s, g, d] / Σ_s 2^(weights[s, g] − max).

    Read past the first-level cache, which other programs' writes do not reach.
    """
    groups, dims = tl.arange(0, GROUP_SUM), tl.arange(0, DIM_BLOCK)
    real_groups = groups < GROUP
    real = real_groups[:, None] & (dims < DIM)[None, :]
    numbers = groups[:, None] * DIM + dims[None, :]
    top = tl.full([GROUP_SUM], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_SUM], tl.float32)
    values = tl.zeros([GROUP_SUM, DIM_BLOCK], tl.float32)
    for first in range(0, live_splits, SPLIT_BLOCK):
        split = first + tl.arange(0, SPLIT_BLOCK)
        live = split < live_splits
        weight = tl.load(
            weights + split[:, None] * GROUP + groups[None, :],
            mask=live[:, None] & real_groups[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        part = tl.load(
            parts + split[:, None, None] * (GROUP * DIM) + numbers[None, :, :],
            mask=live[:, None, None] & real[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        # groups that are none keep −inf, which must not meet itself
        new_top = tl.where(real_groups, tl.maximum(top, tl.max(weight, 0)), 0.0)
        share = tl.exp2(weight - new_top[None, :])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(share, 0)
        values = values * rescale[:, None] + tl.sum(share[:, :, None] * part, 0)
        top = new_top
    result = values / tl.where(real_groups, total, 1.0)[:, None]
    tl.store(out + numbers, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["layer", "min_chunk"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    q,
    pages,
    page_table,
    decode_rows,
    row_seat,
    positions,
    out,
    parts,
    weights,
    arrived,
    layer,
    min_chunk,
    table_stride,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP_SUM: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    CAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (kv_head, i, part): part of the positions that decode row i sees."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    POSITION: tl.constexpr = KV_HEADS * DIM
    PLANE: tl.constexpr = PAGE_SIZE * POSITION
    kv_head, index, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(decode_rows + index).to(tl.int64)
    if row < 0:
        return
    end = tl.load(positions + row) + 1
    seat = tl.load(row_seat + row).to(tl.int64)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(end - WINDOW, 0)
    length = end - start
    live_splits = tl.minimum(tl.cdiv(length, min_chunk), tl.num_programs(2))
    chunk = tl.cdiv(tl.cdiv(length, live_splits), BLOCK_N) * BLOCK_N
    live_splits = tl.cdiv(length, chunk)
    if split >= live_splits:
        return
    first = start + split * chunk
    end = tl.minimum(first + chunk, end)

    groups = tl.arange(0, GROUP_BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    real_dims = dims < DIM
    real_groups = groups < GROUP
    head_numbers = (kv_head * GROUP + groups)[:, None] * DIM + dims[None, :]
    real = real_groups[:, None] & real_dims[None, :]
    table = page_table + seat * table_stride
    keys = pages + layer.to(tl.int64) * (2 * PLANE) + kv_head * DIM
    columns = tl.arange(0, BLOCK_N)
    page = tl.load(table + (first + columns) // PAGE_SIZE, mask=first + columns < end, other=0)
    if PDL:
        cuda.gdc_wait()
    q_tile = tl.load(q + row * (HEADS * DIM) + head_numbers, mask=real, other=0.0)
    if CAST:
        q_tile = q_tile.to(tl.float32)
    top = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    values = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    # of softmax's exponents, to the base 2; one fused operation a score applies it
    scale = 1.4426950408889634 / DIM**0.5
    for n in range(first, end, BLOCK_N):
        position = n + columns
        live = position < end
        offset = page.to(tl.int64) * (LAYERS * 2 * PLANE) + (position % PAGE_SIZE) * POSITION
        # an iteration ahead, so that no load of keys waits for it
        later = position + BLOCK_N
        page = tl.load(table + later // PAGE_SIZE, mask=later < end, other=0)
        here = keys + offset[:, None] + dims[None, :]
        mask = live[:, None] & real_dims[None, :]
        k = tl.load(here, mask=mask, other=0.0)
        v = tl.load(here + PLANE, mask=mask, other=0.0)
        if CAST:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q_tile, k.T, input_precision=PRECISION)
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        share = tl.exp2(scores * scale - (new_top * scale)[:, None])
        rescale = tl.exp2((top - new_top) * scale)
        total = total * rescale + tl.sum(share, 1)
        values = values * rescale[:, None]
        values = tl.dot(share.to(v.dtype), v, values, input_precision=PRECISION)
        top = new_top
    if PDL:
        cuda.gdc_launch_dependents()
    values = values / total[:, None]
    if live_splits == 1:
        target = out + row * (HEADS * DIM) + head_numbers
        tl.store(target, values.to(out.dtype.element_ty), mask=real)
    else:
        item = index * KV_HEADS + kv_head
        parts += item.to(tl.int64) * (tl.num_programs(2) * (GROUP * DIM))
        weights += item * (tl.num_programs(2) * GROUP)
        part = parts + split * (GROUP * DIM) + groups[:, None] * DIM + dims[None, :]
        tl.store(part, values, mask=real)
        tl.store(weights + split * GROUP + groups, top * scale + tl.log2(total), mask=real_groups)
        # every thread's part is written before the count says so
        tl.debug_barrier()
        before = tl.atomic_add(arrived + item, 1, sem="acq_rel", scope="gpu")
        if before == live_splits - 1:
            tl.store(arrived + item, 0)
            target = out + row * (HEADS * DIM) + kv_head * (GROUP * DIM)
            sum_parts(
                parts, weights, target, live_splits, GROUP, DIM, GROUP_SUM, DIM_BLOCK, SPLIT_BLOCK,
            )  # fmt: skip


def decode_attention_triton(
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    decode_rows: torch.Tensor,
    row_seat: torch.Tensor,
    positions: torch.Tensor,
    layer: int,
    num_kv_heads: int,
    window: int,
    out: torch.Tensor,
    scratch: DecodeScratch,
    *,
    tuning: DecodeTuning | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`kernels.decode_attention.decode_attention` in Triton: same arguments, same result to
    rounding.

    The grid depends on Bd and the shapes only, so a captured launch serves every later step. Which
    part arrives last does not change the result: parts are summed in their order.

    Args:
        pdl: programmatic dependent launch. Only q and pages may then be written by the launch
            before this one.
    """
    _, num_heads, dim = q.shape
    num_rows = decode_rows.shape[0]
    if num_rows == 0:
        return out
    check_shapes(q, pages, num_kv_heads, out)
    tuning = tuning or decode_tuning(num_rows, num_kv_heads, dim, q.element_size())
    assert scratch.parts.numel() >= num_rows * tuning.splits * num_heads * dim
    assert scratch.arrived.numel() >= num_rows * num_kv_heads
    _, layers, _, page_size, _, _ = pages.shape
    launch: Any = decode_kernel[(num_kv_heads, num_rows, tuning.splits)]
    launch(
        q,
        pages,
        page_table,
        decode_rows,
        row_seat,
        positions,
        out,
        scratch.parts,
        scratch.weights,
        scratch.arrived,
        layer,
        tuning.min_chunk,
        page_table.stride(0),
        **decode_constants(
            layers, num_heads, num_kv_heads, dim, page_size, window, q.element_size(), tuning
        ),
        CAST=INTERPRETED and q.dtype == torch.bfloat16,
        PDL=pdl,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def decode_constants(
    layers: int,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    page_size: int,
    window: int,
    item_bytes: int,
    tuning: DecodeTuning,
) -> dict[str, Any]:
    """What decode_kernel is compiled for, CAST and PDL apart."""
    dim_block = triton.next_power_of_2(dim)
    group = triton.next_power_of_2(num_heads // num_kv_heads)
    return {
        "LAYERS": layers,
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "DIM": dim,
        "PAGE_SIZE": page_size,
        "DIM_BLOCK": dim_block,
        "GROUP_BLOCK": DOT_ROWS,
        "BLOCK_N": tuning.block_n,
        "WINDOW": window,
        "GROUP_SUM": group,
        "SPLIT_BLOCK": max(1, SUM_BLOCK // (group * dim_block)),
        "PRECISION": "tf32x3" if item_bytes == 4 and not INTERPRETED else "ieee",
    }
