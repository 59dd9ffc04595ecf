"""kernels.rope_store in Triton: one program a row and a few heads of one kind."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.add_delta_triton import add_delta, delta_arguments, row_delta
from kernels.lora_tables import LoraDelta

#: heads a program, by rows: a warp holds four heads of 128 numbers in 16-byte loads
FEW_ROWS, FEW_HEADS, MANY_HEADS = 512, 4, 8
#: numbers of half a head that a thread holds
NUMBERS = 8


@triton.jit
def turned(low, high, cos, sin):  # type: ignore[no-untyped-def]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit(do_not_specialize=["cell", "num_cells", "layer"])  # type: ignore[untyped-decorator]
def rope_store_kernel(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912
    qkv,
    positions,
    row_seat,
    page_table,
    pages,
    layer,
    cos,
    sin,
    q_out,
    q_norm,
    k_norm,
    eps,
    qkv_stride,
    seat_stride,
    page_stride,
    delta,
    row_slot,
    live,
    g_off,
    arena,
    cell,
    num_cells,
    delta_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    EAGER: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (j, t): the j-th group of heads of row t; groups hold q, k or v heads alone.

    A head is read as low and high half of its rotated numbers, and the tail that is not rotated.
    """
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0)
    q_groups: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    kv_groups: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    seat = tl.load(row_seat + row)
    position = tl.load(positions + row)
    is_q = group < q_groups
    is_v = group >= q_groups + kv_groups
    if is_q:
        head0, num_heads, kind0 = group * GROUP, HEADS, 0
        target = q_out + row * (HEADS * DIM)
        stored = seat >= 0
        norm = q_norm
    else:
        value = is_v.to(tl.int32)
        head0 = (group - q_groups - value * kv_groups) * GROUP
        num_heads, kind0 = KV_HEADS, HEADS + value * KV_HEADS
        at = tl.maximum(seat, 0).to(tl.int64) * seat_stride + position // PAGE_SIZE
        page = tl.load(page_table + at)
        stored = (seat >= 0) & (page >= 0)
        place = (layer * 2 + value) * PAGE_SIZE + position % PAGE_SIZE
        target = pages + page.to(tl.int64) * page_stride + place * (KV_HEADS * DIM)
        norm = k_norm
    heads = head0 + tl.arange(0, GROUP)
    pairs = tl.arange(0, BLOCK_HALF)
    real_head = (heads < num_heads)[:, None]
    inside = real_head & (pairs < HALF)[None, :]
    offsets = heads[:, None] * DIM + pairs[None, :]
    columns = (kind0 + heads)[:, None] * DIM + pairs[None, :]
    if HAS_DELTA:
        has_delta, gain = row_delta(row, row_slot, live, g_off, cell, num_cells)
        delta_row = delta + row * delta_stride
    # of the tile's shape, so that they are read in its layout
    all_pairs = tl.zeros((GROUP, BLOCK_HALF), tl.int32) + pairs[None, :]
    turns = inside & (not is_v)
    if ROPE:
        angle = position.to(tl.int64) * HALF + all_pairs
        c = tl.load(cos + angle, mask=turns, other=1.0)
        s = tl.load(sin + angle, mask=turns, other=0.0)
    if NORM:
        low_weight = tl.load(norm + all_pairs, mask=turns, other=1.0)
        high_weight = tl.load(norm + HALF + all_pairs, mask=turns, other=1.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    qkv_row = qkv + row * qkv_stride
    low = tl.load(qkv_row + columns, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv_row + columns + HALF, mask=inside, other=0.0).to(tl.float32)
    if BLOCK_TAIL > 0:
        rest = 2 * HALF + tl.arange(0, BLOCK_TAIL)
        inside_tail = real_head & (rest < DIM)[None, :]
        all_rest = tl.zeros((GROUP, BLOCK_TAIL), tl.int32) + rest[None, :]
        tail_columns = (kind0 + heads)[:, None] * DIM + rest[None, :]
        tail = tl.load(qkv_row + tail_columns, mask=inside_tail, other=0.0).to(tl.float32)
    if HAS_DELTA:
        low = add_delta(
            low, delta_row + columns, columns, inside, has_delta, gain, arena, EAGER, OFFSET_UNIT
        )
        high = add_delta(
            high, delta_row + columns + HALF, columns + HALF, inside, has_delta, gain, arena,
            EAGER, OFFSET_UNIT,
        )  # fmt: skip
        if BLOCK_TAIL > 0:
            tail = add_delta(
                tail, delta_row + tail_columns, tail_columns, inside_tail, has_delta, gain, arena,
                EAGER, OFFSET_UNIT,
            )  # fmt: skip
    if NORM:
        # values are neither normed nor turned: their scale and weights are 1
        squares = tl.sum(low * low + high * high, axis=1)
        if BLOCK_TAIL > 0:
            squares += tl.sum(tail * tail, axis=1)
        scale = tl.where(is_v, 1.0, tl.rsqrt(squares / DIM + eps))[:, None]
        low *= scale * low_weight.to(tl.float32)
        high *= scale * high_weight.to(tl.float32)
        if BLOCK_TAIL > 0:
            weighed = inside_tail & (not is_v)
            tail *= scale * tl.load(norm + all_rest, mask=weighed, other=1.0).to(tl.float32)
    if ROPE:
        turned_low, turned_high = turned(low, high, c.to(tl.float32), s.to(tl.float32))
        low, high = tl.where(is_v, low, turned_low), tl.where(is_v, high, turned_high)
    dtype = q_out.dtype.element_ty
    tl.store(target + offsets, low.to(dtype), mask=inside & stored)
    tl.store(target + offsets + HALF, high.to(dtype), mask=inside & stored)
    if BLOCK_TAIL > 0:
        tail_offsets = heads[:, None] * DIM + rest[None, :]
        tl.store(target + tail_offsets, tail.to(dtype), mask=inside_tail & stored)


def rope_store_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    row_seat: torch.Tensor,
    page_table: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    use_rope: bool = True,
    delta: LoraDelta | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """`kernels.rope_store.rope_store` in Triton: same arguments, same result to fp32 rounding
    before the one rounding to the compute dtype.

    pdl: a programmatic dependent launch: may start while the kernel before it ends.
    """
    num_rows, heads, dim = q_out.shape
    if num_rows == 0:
        return q_out
    kv_heads = pages.shape[4]
    half = cos.shape[-1] if use_rope else dim // 2
    tail = dim - 2 * half
    group = FEW_HEADS if num_rows <= FEW_ROWS else MANY_HEADS
    block_half = triton.next_power_of_2(half)
    grid = (triton.cdiv(heads, group) + 2 * triton.cdiv(kv_heads, group), num_rows)
    launch: Any = rope_store_kernel[grid]
    launch(
        qkv,
        positions,
        row_seat,
        page_table,
        pages,
        layer,
        cos,
        sin,
        q_out,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        qkv.stride(0),
        page_table.stride(0),
        pages.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=half,
        PAGE_SIZE=pages.shape[3],
        GROUP=group,
        BLOCK_HALF=block_half,
        BLOCK_TAIL=triton.next_power_of_2(tail) if tail else 0,
        NORM=q_norm is not None,
        ROPE=use_rope,
        PDL=pdl,
        num_warps=min(max(group * block_half // (32 * NUMBERS), 1), 8),
        **({"launch_pdl": True} if pdl else {}),
        **delta_arguments(delta, qkv),
    )
    return q_out
