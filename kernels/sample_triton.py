"""kernels.sample in Triton: a launch over blocks of the vocabulary, another one for
rows that are cut, and one over rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels import sample_tables as tables
from kernels.sample import BLOCK, CANDIDATES, SampleScratch
from kernels.sample_candidates_triton import candidates_kernel
from kernels.sample_draw_triton import draw_kernel
from kernels.sample_rules_triton import FLAGS, NOTHING, SEAT_WORDS, adjusted
from kernels.sample_tables import SampleRows, SeatTable

SCAN_WARPS, CANDIDATE_WARPS, DRAW_WARPS = 8, 8, 8
DRAWN = tl.constexpr(tables.DRAWN)
INVERSE_TEMPERATURE = tl.constexpr(tables.INVERSE_TEMPERATURE)


@triton.jit  # type: ignore[untyped-decorator]
def scan_kernel(  # type: ignore[no-untyped-def]
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
    columns = block * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    x = tl.load(logits + row * logits_stride + columns, mask=inside, other=0.0).to(tl.float32)
    at = row * num_blocks + block
    # false for nan and for both infinities
    finite = tl.abs(x) < float("inf")
    tl.store(faults + at, tl.sum(tl.where(finite, 0, 1), axis=0))
    flags = tl.load(words + seat * SEAT_WORDS + FLAGS)
    mask = -1
    if MASKED:
        mask = tl.load(mask_of_row + row)
    x = adjusted(
        x, columns, inside, seat, tl.load(positions + row), flags, words, floats, tally, bias,
        token_masks, mask, vocab_size, mask_words,
    )  # fmt: skip
    largest = tl.max(x, axis=0)
    tl.store(maxima + at, largest)
    tl.store(places + at, tl.min(tl.where(x == largest, columns, vocab_size), axis=0))
    if (flags & DRAWN) != 0:
        inverse = tl.load(floats + seat * SEAT_WORDS + INVERSE_TEMPERATURE)
        top = tl.where(largest > NOTHING, largest, 0.0)
        tl.store(sums + at, tl.sum(tl.exp((x - top) * inverse), axis=0))


def sample_triton(
    logits: torch.Tensor,
    rows: SampleRows,
    table: SeatTable,
    scratch: SampleScratch,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """`kernels.sample.sample` in Triton: same arguments; the same tokens but where fp32 rounding
    moves a threshold or a cumulative weight across the number drawn.

    The grid depends on N and V only, what a row asks for is read on the device: a captured launch
    serves every later step without token masks. A row's sums do not depend on the other rows.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return tokens
    masks, mask_of_row = rows.token_masks, rows.mask_of_row
    masked = masks is not None and mask_of_row is not None
    num_blocks = scratch.maxima.shape[1]
    shared: tuple[Any, ...] = (
        logits, logits.stride(0), rows.seats, rows.positions,
        table.words, table.floats, table.tally, table.bias,
        masks if masks is not None else rows.seats,
        mask_of_row if mask_of_row is not None else rows.seats,
        masks.shape[1] if masks is not None else 0,
        scratch.maxima, scratch.sums, scratch.rests, scratch.places, scratch.counts,
        scratch.faults, scratch.values, scratch.columns, vocab_size, num_blocks,
    )  # fmt: skip
    constants = {"MASKED": masked, "BLOCK": BLOCK, "CANDIDATES": CANDIDATES}
    scan: Any = scan_kernel[(num_blocks, num_rows)]
    scan(*shared, **constants, num_warps=SCAN_WARPS)
    if rows.cut:
        candidates: Any = candidates_kernel[(num_blocks, num_rows)]
        candidates(*shared, **constants, num_warps=CANDIDATE_WARPS)
    draw: Any = draw_kernel[(num_rows,)]
    draw(
        *shared,
        rows.numbers,
        table.last_token,
        tokens,
        **constants,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=DRAW_WARPS,
    )
    return tokens
