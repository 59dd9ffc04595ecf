"""kernels.rank_tokens in Triton: one launch over blocks of the vocabulary, one over rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.rank_tokens import BLOCK, KEPT, RankScratch

NOTHING = tl.constexpr(float("-inf"))
FAR = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["top"])  # type: ignore[untyped-decorator]
def rank_blocks_kernel(  # type: ignore[no-untyped-def]
    logits,
    logits_stride,
    rows,
    maxima,
    sums,
    values,
    value_columns,
    vocab_size,
    num_blocks,
    top,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Program (b, i): block b of the i-th row that asks."""
    block, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    x = tl.load(logits + row * logits_stride + columns, mask=inside, other=NOTHING).to(tl.float32)
    at = index * num_blocks + block
    largest = tl.max(x, axis=0)
    tl.store(maxima + at, largest)
    tl.store(sums + at, tl.sum(tl.exp(x - largest), axis=0))
    for place in range(top):
        value = tl.max(x, axis=0)
        column = tl.min(tl.where(x == value, columns, FAR), axis=0)
        tl.store(values + at * KEPT + place, value)
        tl.store(value_columns + at * KEPT + place, column)
        x = tl.where(columns == column, NOTHING, x)


@triton.jit(do_not_specialize=["top"])  # type: ignore[untyped-decorator]
def rank_rows_kernel(  # type: ignore[no-untyped-def]
    logits,
    logits_stride,
    rows,
    tokens,
    maxima,
    sums,
    values,
    value_columns,
    chosen,
    top_ids,
    top_values,
    num_blocks,
    top,
    top_stride,
    BLOCKS: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Program i: the i-th row that asks."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    token = tl.maximum(tl.load(tokens + row), 0)
    x = tl.load(logits + row * logits_stride + token).to(tl.float32)
    blocks = tl.arange(0, BLOCKS)
    at = index * num_blocks + blocks
    real = blocks < num_blocks
    block_maxima = tl.load(maxima + at, mask=real, other=NOTHING)
    block_sums = tl.load(sums + at, mask=real, other=0.0)
    largest = tl.max(block_maxima, axis=0)
    normal = largest + tl.log(tl.sum(block_sums * tl.exp(block_maxima - largest), axis=0))
    tl.store(chosen + index, x - normal)
    slots = tl.arange(0, BLOCKS * KEPT)
    slot_at = index * num_blocks * KEPT + slots
    filled = (slots // KEPT < num_blocks) & (slots % KEPT < top)
    left = tl.load(values + slot_at, mask=filled, other=NOTHING)
    columns = tl.load(value_columns + slot_at, mask=filled, other=FAR)
    for place in range(top):
        value = tl.max(left, axis=0)
        column = tl.min(tl.where(left == value, columns, FAR), axis=0)
        tl.store(top_values + index * top_stride + place, value - normal)
        tl.store(top_ids + index * top_stride + place, column)
        left = tl.where(columns == column, NOTHING, left)


def rank_tokens_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    top: int,
    scratch: RankScratch,
    chosen: torch.Tensor,
    top_ids: torch.Tensor,
    top_values: torch.Tensor,
) -> None:
    """`kernels.rank_tokens.rank_tokens` in Triton: same arguments, same result to fp32 rounding."""
    num_rows, vocab_size = rows.shape[0], logits.shape[1]
    if num_rows == 0:
        return
    num_blocks = scratch.maxima.shape[1]
    kept = (scratch.maxima, scratch.sums, scratch.values, scratch.columns)
    blocks: Any = rank_blocks_kernel[(num_blocks, num_rows)]
    blocks(
        logits, logits.stride(0), rows, *kept, vocab_size, num_blocks, top,
        BLOCK=BLOCK, KEPT=KEPT, num_warps=8,
    )  # fmt: skip
    combine: Any = rank_rows_kernel[(num_rows,)]
    combine(
        logits, logits.stride(0), rows, tokens, *kept, chosen, top_ids, top_values, num_blocks,
        top, top_ids.stride(0), BLOCKS=triton.next_power_of_2(num_blocks), KEPT=KEPT, num_warps=8,
    )  # fmt: skip
