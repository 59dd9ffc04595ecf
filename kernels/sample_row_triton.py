"""Passes over a whole row, for the few whose candidates do not settle where top_k or top_p cut.

Each pass looks at one key and moves to keys that stand in the row, so their number is that of
halvings of the distinct weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.sample_rules_triton import adjusted
from kernels.sample_threshold_triton import ONE, mass_of

FAR = tl.constexpr(2147483647)


@triton.jit  # type: ignore[untyped-decorator]
def weights_of(  # type: ignore[no-untyped-def]
    block, row, logits, words, floats, tally, bias, token_masks, sizes, BLOCK: tl.constexpr
):
    """fp32 weights [BLOCK] of a block, 0 behind the last token.

    Args: row: (first logit, seat, position, flags, mask, largest logit, inverse temperature);
        sizes: (vocab_size, mask_words).
    """
    first, seat, position, flags, mask, largest, inverse = row
    vocab_size, mask_words = sizes
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    x = tl.load(logits + first + columns, mask=inside, other=0.0).to(tl.float32)
    x = adjusted(
        x, columns, inside, seat, position, flags, words, floats, tally, bias, token_masks, mask,
        vocab_size, mask_words,
    )  # fmt: skip
    return tl.exp((x - largest) * inverse)


@triton.jit  # type: ignore[untyped-decorator]
def above_in_row(  # type: ignore[no-untyped-def]
    key, row, logits, words, floats, tally, bias, token_masks, sizes, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum and number of the weights above a key; largest key at or below it, smallest above."""
    mass = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    below = tl.zeros((BLOCK,), tl.int32)
    beyond = tl.full((BLOCK,), FAR, tl.int32)
    for block in range(num_blocks):
        weights = weights_of(
            block, row, logits, words, floats, tally, bias, token_masks, sizes, BLOCK
        )
        keys = weights.to(tl.int32, bitcast=True)
        over = keys > key
        mass += tl.where(over, weights, 0.0)
        count += tl.where(over, 1.0, 0.0)
        below = tl.maximum(below, tl.where(over, 0, keys))
        beyond = tl.minimum(beyond, tl.where(over, keys, FAR))
    return tl.sum(mass, 0), tl.sum(count, 0), tl.max(below, 0), tl.min(beyond, 0)


@triton.jit  # type: ignore[untyped-decorator]
def smallest_key_in_row(  # type: ignore[no-untyped-def]
    counted, limit, row, logits, words, floats, tally, bias, token_masks, sizes, num_blocks,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """kernels.sample_threshold_triton.smallest_key over the row; counted: amounts are 1, not the
    weights."""
    low, high = tl.full((), -1, tl.int32), tl.full((), ONE, tl.int32)
    while high - low > 1:
        middle = (low + high) // 2
        mass, count, below, beyond = above_in_row(
            middle, row, logits, words, floats, tally, bias, token_masks, sizes, num_blocks, BLOCK
        )
        less = tl.where(counted, count, mass) < limit
        high = tl.where(less, below, high)
        low = tl.where(less, low, beyond - 1)
    return high


@triton.jit  # type: ignore[untyped-decorator]
def threshold_in_row(  # type: ignore[no-untyped-def]
    total, top_k, top_p, min_p, row, logits, words, floats, tally, bias, token_masks, sizes,
    num_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    """The threshold of kernels.sample, for any row."""
    vocab_size, _ = sizes
    first = tl.full((), 0, tl.int32)
    mass = total
    if top_k < vocab_size:
        limit = top_k.to(tl.float32)
        first = smallest_key_in_row(
            True, limit, row, logits, words, floats, tally, bias, token_masks, sizes, num_blocks,
            BLOCK,
        )  # fmt: skip
        above, count, _, _ = above_in_row(
            first, row, logits, words, floats, tally, bias, token_masks, sizes, num_blocks, BLOCK
        )
        mass = mass_of(first, above, count, limit)
    if top_p < 1.0:
        second = smallest_key_in_row(
            False, top_p * mass, row, logits, words, floats, tally, bias, token_masks, sizes,
            num_blocks, BLOCK,
        )  # fmt: skip
        first = tl.maximum(first, second)
    return tl.maximum(first.to(tl.float32, bitcast=True), min_p)


@triton.jit  # type: ignore[untyped-decorator]
def kept_sums(  # type: ignore[no-untyped-def]
    threshold, row, logits, words, floats, tally, bias, token_masks, sizes, num_blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sum of the kept weights of each block, [BLOCKS]."""
    index = tl.arange(0, BLOCKS)
    sums = tl.zeros((BLOCKS,), tl.float32)
    for block in range(num_blocks):
        weights = weights_of(
            block, row, logits, words, floats, tally, bias, token_masks, sizes, BLOCK
        )
        here = tl.sum(tl.where(weights >= threshold, weights, 0.0), axis=0)
        sums = tl.where(index == block, here, sums)
    return sums
