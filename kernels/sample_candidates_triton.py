"""Between the two launches of kernels.sample, for steps with rows that top_k, top_p or min_p cut:
the most likely tokens of every block."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import sample_tables as tables
from kernels.sample_rules_triton import FLAGS, NOTHING, SEAT_WORDS, adjusted

CUT = tl.constexpr(tables.CUT)
INVERSE_TEMPERATURE = tl.constexpr(tables.INVERSE_TEMPERATURE)
#: a token e**DEEP times less likely than its block's best is no candidate
DEEP = tl.constexpr(30.0)
MOST_HALVINGS = tl.constexpr(24)


@triton.jit  # type: ignore[untyped-decorator]
def candidates_above(x, largest, inverse_temperature, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """A logit that at most MOST of x reach, and half as many if ties permit."""
    top = tl.where(largest > NOTHING, largest, 0.0)
    lowest = tl.min(tl.where(x > NOTHING, x, top), axis=0)
    low = tl.maximum(top - DEEP / inverse_temperature, lowest)
    high = top
    count = tl.sum((x >= low).to(tl.int32), axis=0)
    cut = tl.where(count <= MOST, low, float("inf"))
    halvings = 0
    going = count > MOST
    while going:
        middle = 0.5 * low + 0.5 * high
        count = tl.sum((x >= middle).to(tl.int32), axis=0)
        fits = count <= MOST
        low = tl.where(fits, low, middle)
        high = tl.where(fits, middle, high)
        cut = tl.where(fits, middle, cut)
        halvings += 1
        going = (halvings < MOST_HALVINGS) & ((not fits) | (2 * count < MOST))
    return cut


@triton.jit  # type: ignore[untyped-decorator]
def candidates_kernel(  # type: ignore[no-untyped-def]
    logits,
    logits_stride,
    seats,
    positions,
    words,
    floats,
    tally,
    bias,
    token_masks,
    mask_of_row,
    mask_words,
    maxima,
    sums,
    rests,
    places,
    counts,
    faults,
    values,
    value_columns,
    vocab_size,
    num_blocks,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Program (b, i): block b of row i; see SampleScratch."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    seat = tl.load(seats + row)
    if seat < 0:
        return
    flags = tl.load(words + seat * SEAT_WORDS + FLAGS)
    if (flags & CUT) == 0:
        return
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    x = tl.load(logits + row * logits_stride + columns, mask=inside, other=0.0).to(tl.float32)
    at = row * num_blocks + block
    mask = -1
    if MASKED:
        mask = tl.load(mask_of_row + row)
    x = adjusted(
        x, columns, inside, seat, tl.load(positions + row), flags, words, floats, tally, bias,
        token_masks, mask, vocab_size, mask_words,
    )  # fmt: skip
    inverse = tl.load(floats + seat * SEAT_WORDS + INVERSE_TEMPERATURE)
    kept = x >= candidates_above(x, tl.max(x, axis=0), inverse, CANDIDATES)
    kept_at = at * CANDIDATES + tl.cumsum(kept.to(tl.int32), axis=0) - 1
    tl.store(values + kept_at, x, mask=kept)
    tl.store(value_columns + kept_at, columns, mask=kept)
    tl.store(counts + at, tl.sum(kept.to(tl.int32), axis=0))
    tl.store(rests + at, tl.max(tl.where(kept, NOTHING, x), axis=0))
