"""The second launch of kernels.sample: one program a row picks its token and remembers it."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import sample_tables as tables
from kernels.sample_row_triton import kept_sums, threshold_in_row, weights_of
from kernels.sample_rules_triton import FLAGS, NOTHING, ONE_OUTPUT, PENALISED, SEAT_WORDS
from kernels.sample_threshold_triton import threshold_among

DRAWN = tl.constexpr(tables.DRAWN)
CUT = tl.constexpr(tables.CUT)
INVERSE_TEMPERATURE = tl.constexpr(tables.INVERSE_TEMPERATURE)
TOP_P = tl.constexpr(tables.TOP_P)
MIN_P = tl.constexpr(tables.MIN_P)
TOP_K = tl.constexpr(tables.TOP_K)


@triton.jit  # type: ignore[untyped-decorator]
def first_beyond(weights, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """First index whose cumulative weight exceeds target, fp64; the last of weight > 0 if rounding
    leaves none."""
    index = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weights.to(tl.float64), axis=0)
    beyond = (cumulative > target) & (weights > 0)
    first = tl.min(tl.where(beyond, index, SIZE), axis=0)
    last = tl.max(tl.where(weights > 0, index, 0), axis=0)
    return tl.where(first < SIZE, first, last)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(  # type: ignore[no-untyped-def]
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
    numbers,
    last_token,
    tokens,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program i: row i; see SampleScratch."""
    index = tl.program_id(0).to(tl.int64)
    seat = tl.load(seats + index)
    if seat < 0:
        return
    position = tl.load(positions + index)
    mask = -1
    if MASKED:
        mask = tl.load(mask_of_row + index)
    flags = tl.load(words + seat * SEAT_WORDS + FLAGS)
    blocks = tl.arange(0, BLOCKS)
    at = index * num_blocks + blocks
    real = blocks < num_blocks
    block_maxima = tl.load(maxima + at, mask=real, other=NOTHING)
    largest, best = tl.max(
        block_maxima, axis=0, return_indices=True, return_indices_tie_break_left=True
    )
    num_faults = tl.sum(tl.load(faults + at, mask=real, other=0), axis=0)
    good = (num_faults == 0) & (largest > NOTHING)
    token = tl.load(places + index * num_blocks + best)
    if good & ((flags & DRAWN) != 0):
        inverse = tl.load(floats + seat * SEAT_WORDS + INVERSE_TEMPERATURE)
        number = tl.load(numbers + index)
        row = (index * logits_stride, seat, position, flags, mask, largest, inverse)
        sizes = (vocab_size, mask_words)
        block_sums = tl.load(sums + at, mask=real, other=0.0)
        block_sums *= tl.exp((block_maxima - largest) * inverse)
        threshold = tl.full((), 0.0, tl.float32)
        known = threshold > 0.0
        if (flags & CUT) != 0:
            top_k = tl.load(words + seat * SEAT_WORDS + TOP_K)
            top_p = tl.load(floats + seat * SEAT_WORDS + TOP_P)
            min_p = tl.load(floats + seat * SEAT_WORDS + MIN_P)
            total = tl.sum(block_sums, axis=0)
            slots = tl.arange(0, BLOCKS * CANDIDATES)
            slot_block = slots // CANDIDATES
            count = tl.load(
                counts + index * num_blocks + slot_block, mask=slot_block < num_blocks, other=0
            )
            slot_at = index * num_blocks * CANDIDATES + slots
            x = tl.load(values + slot_at, mask=slots % CANDIDATES < count, other=NOTHING)
            weights = tl.exp((x - largest) * inverse)
            rest = tl.max(tl.load(rests + at, mask=real, other=NOTHING), axis=0)
            rest = tl.exp((rest - largest) * inverse)
            threshold, known = threshold_among(
                weights, total, top_k, top_p, min_p, rest, vocab_size
            )
            if known:
                kept = tl.where(weights >= threshold, weights, 0.0)
                target = number * tl.sum(kept.to(tl.float64), axis=0)
                chosen = first_beyond(kept, target, BLOCKS * CANDIDATES)
                token = tl.load(value_columns + index * num_blocks * CANDIDATES + chosen)
            else:
                threshold = threshold_in_row(
                    total, top_k, top_p, min_p, row, logits, words, floats, tally, bias,
                    token_masks, sizes, num_blocks, BLOCK,
                )  # fmt: skip
                block_sums = kept_sums(
                    threshold, row, logits, words, floats, tally, bias, token_masks, sizes,
                    num_blocks, BLOCK, BLOCKS,
                )  # fmt: skip
        if not known:
            target = number * tl.sum(block_sums.to(tl.float64), axis=0)
            block = first_beyond(block_sums, target, BLOCKS)
            before = tl.sum(tl.where(blocks < block, block_sums.to(tl.float64), 0.0), axis=0)
            weights_here = weights_of(
                block, row, logits, words, floats, tally, bias, token_masks, sizes, BLOCK
            )
            weights_here = tl.where(weights_here >= threshold, weights_here, 0.0)
            token = block * BLOCK + first_beyond(weights_here, target - before, BLOCK)
    if good & ((flags & PENALISED) != 0):
        tl.atomic_add(tally + seat.to(tl.int64) * vocab_size + token, ONE_OUTPUT)
    token = tl.where(good, token, -1)
    tl.store(tokens + index, token)
    tl.store(last_token + seat, tl.maximum(token, 0))
