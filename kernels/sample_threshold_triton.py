"""The smallest weight that top_k, top_p and min_p keep, without ordering the row.

Weights are in [0, 1], 1 the largest of the row. Their bits as whole numbers (keys) have the same
order. Both limits have one form, so one search by halves serves them: the smallest key such that
what lies above it, counted or summed, is less than a limit. That is the top_k-th largest key for
the count top_k, and for the sum p · mass the last of the fewest that reach it.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE = tl.constexpr(0x3F800000)


@triton.jit
def smallest_key(keys, amounts, limit):  # type: ignore[no-untyped-def]
    """Smallest key k in 0 … ONE with Σ amounts[keys > k] < limit; ONE if there is none."""
    low, high = tl.full((), -1, tl.int32), tl.full((), ONE, tl.int32)
    for _ in range(31):
        middle = (low + high) // 2
        less = tl.sum(tl.where(keys > middle, amounts, 0.0), axis=0) < limit
        high = tl.where(less, middle, high)
        low = tl.where(less, low, middle)
    return high


@triton.jit
def mass_of(top_k_key, above, count_above, top_k):  # type: ignore[no-untyped-def]
    """Sum of the top_k largest weights; of equals at the edge only as many as fit."""
    return above + (top_k - count_above) * top_k_key.to(tl.float32, bitcast=True)


@triton.jit
def threshold_among(weights, total, top_k, top_p, min_p, rest, vocab_size):  # type: ignore[no-untyped-def]
    """(threshold, whether it is the whole row's) from candidates.

    Args: weights [n], 0 where there is none; total: of the whole row; rest: the largest weight that
        is not among them.
    """
    keys = weights.to(tl.int32, bitcast=True)
    first, mass, known = top_k * 0, total, top_k > 0
    if top_k < vocab_size:
        limit = top_k.to(tl.float32)
        first = smallest_key(keys, tl.where(weights > 0, 1.0, 0.0), limit)
        above = keys > first
        mass = mass_of(
            first, tl.sum(tl.where(above, weights, 0.0), axis=0),
            tl.sum(tl.where(above, 1.0, 0.0), axis=0), limit,
        )  # fmt: skip
        known = (top_p >= 1.0) | (first.to(tl.float32, bitcast=True) > rest) | (rest == 0)
    if top_p < 1.0:
        first = tl.maximum(first, smallest_key(keys, weights, top_p * mass))
    threshold = tl.maximum(first.to(tl.float32, bitcast=True), min_p)
    return threshold, known & ((threshold > rest) | (rest == 0))
