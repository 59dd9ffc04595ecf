"""Logits as the rules of a seat change them, for every kernel that reads them."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import sample_tables as tables

PENALISED = tl.constexpr(tables.PENALISED)
BIASED = tl.constexpr(tables.BIASED)
BANNED = tl.constexpr(tables.BANNED)
RULED = tl.constexpr(tables.PENALISED | tables.BIASED | tables.BANNED)
SEAT_WORDS = tl.constexpr(tables.SEAT_WORDS)
FLAGS = tl.constexpr(tables.FLAGS)
REPETITION = tl.constexpr(tables.REPETITION)
PRESENCE = tl.constexpr(tables.PRESENCE)
FREQUENCY = tl.constexpr(tables.FREQUENCY)
BANNED_UNTIL = tl.constexpr(tables.BANNED_UNTIL)
IN_PROMPT = tl.constexpr(tables.IN_PROMPT)
MAY_NOT_COME = tl.constexpr(tables.MAY_NOT_COME)
ONE_OUTPUT = tl.constexpr(tables.ONE_OUTPUT)
LARGEST = tl.constexpr(3.4028234663852886e38)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def adjusted(  # type: ignore[no-untyped-def]
    x,
    columns,
    inside,
    seat,
    position,
    flags,
    words,
    floats,
    tally,
    bias,
    token_masks,
    mask,
    vocab_size,
    mask_words,
):
    """fp32 logits of one row after kernels.sample's rules; −∞ outside.

    Args: x and columns [n]; mask: row of token_masks, −1 = none.
    """
    if (flags & RULED) != 0:
        at = seat.to(tl.int64) * vocab_size + columns
        if (flags & (PENALISED | BANNED)) != 0:
            marks = tl.load(tally + at, mask=inside, other=0)
            if (flags & PENALISED) != 0:
                x = penalised(x, marks, floats + seat * SEAT_WORDS)
        if (flags & BIASED) != 0:
            x += tl.load(bias + at, mask=inside, other=0.0)
        if (flags & BANNED) != 0:
            early = position < tl.load(words + seat * SEAT_WORDS + BANNED_UNTIL)
            marks = tl.load(tally + at, mask=inside & early, other=0)
            x = tl.where((marks & MAY_NOT_COME) != 0, NOTHING, x)
    if mask >= 0:
        at = mask.to(tl.int64) * mask_words + columns // 32
        word = tl.load(token_masks + at, mask=inside, other=0)
        x = tl.where(((word >> (columns % 32)) & 1) != 0, x, NOTHING)
    return tl.where(inside, x, NOTHING)


@triton.jit
def penalised(x, marks, floats):  # type: ignore[no-untyped-def]
    count = marks // ONE_OUTPUT
    seen = ((marks & IN_PROMPT) != 0) | (count > 0)
    repetition = tl.load(floats + REPETITION)
    x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, repetition), x * repetition), x)
    # a penalty near 0 overflows; two infinities would have no difference
    x = tl.minimum(x, LARGEST)
    x -= count.to(tl.float32) * tl.load(floats + FREQUENCY)
    return x - tl.where(count > 0, tl.load(floats + PRESENCE), 0.0)
