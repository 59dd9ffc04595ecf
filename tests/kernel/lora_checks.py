"""Runs the Triton kernels and their references on one case and compares every byte around."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.lora_add import lora_add
from kernels.lora_add_triton import lora_add_triton
from kernels.lora_delta import lora_delta
from kernels.lora_delta_triton import lora_delta_triton
from kernels.lora_shrink import lora_shrink
from kernels.lora_shrink_triton import lora_shrink_triton
from kernels.lora_tables import LoraDelta
from kernels.lora_tuning import DeltaTuning, ShrinkTuning
from tests.kernel.lora_case import CELL, FIRST_ENTRY, LoraCase

#: fp32 sums of a few hundred products of size one, in two orders
SUM_TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
#: one rounding to y's dtype; two neighbours at most one unit in the last place apart
ROUNDING = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.float16: {"rtol": 2**-10, "atol": 2**-12},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9},
}


#: two roundings of one low-rank input may be neighbours
NEIGHBOURS = {torch.float32: 0.0, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def check_all(
    case: LoraCase, shrink: ShrinkTuning | None = None, delta: DeltaTuning | None = None
) -> None:
    """Shrink, delta and the plain consumer, each from what the one before should have given."""
    check_add(case, check_delta(case, check_shrink(case, shrink), delta))


def check_shrink(case: LoraCase, tuning: ShrinkTuning | None = None) -> torch.Tensor:
    """Returns the reference's output."""
    num_slices = case.columns.num_slices
    arguments = (case.x, case.table, case.plan, FIRST_ENTRY, num_slices)
    expected = lora_shrink(*arguments, case.empty_u())
    out = case.empty_u()
    assert lora_shrink_triton(*arguments, out, tuning) is out
    torch.testing.assert_close(out.sum(0), expected.sum(0), equal_nan=True, **SUM_TOLERANCE)
    # what the reference leaves alone stays NaN: base rows, and columns at and above a rank
    assert torch.equal(out.isnan(), expected.isnan())
    return expected


def check_delta(case: LoraCase, u: torch.Tensor, tuning: DeltaTuning | None = None) -> torch.Tensor:
    """Returns the reference's output, a canary where it writes nothing."""
    buffer = case.y._base
    assert buffer is not None
    expected_buffer, actual_buffer = (torch.full_like(buffer, torch.nan) for _ in range(2))
    expected, actual = case.view_of(expected_buffer), case.view_of(actual_buffer)
    arguments = (u, case.table, case.plan, FIRST_ENTRY, case.columns, CELL)
    lora_delta(*arguments, expected)
    assert lora_delta_triton(*arguments, actual, tuning) is actual
    check_rounded(case, u, actual, expected)
    assert torch.equal(actual_buffer.isnan(), expected_buffer.isnan())
    slots = case.row_slot.long()
    written = (slots >= 0) & (case.table.live[slots.clamp(min=0), CELL] > 0)
    assert torch.equal(~expected.isnan(), written[:, None].expand_as(expected))
    return expected


def check_rounded(
    case: LoraCase, u: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor
) -> None:
    """Equal up to one rounding of the result and one of each low-rank input."""
    dtype = case.y.dtype
    magnitude = torch.zeros(expected.shape, dtype=dtype, device=expected.device)
    if NEIGHBOURS[dtype]:
        arena = case.table.arena.clone()
        arena[1::2] &= 0x7F  # numbers without their sign
        table = replace(case.table, arena=arena)
        lora_delta(u.abs(), table, case.plan, FIRST_ENTRY, case.columns, CELL, magnitude)
    limits = ROUNDING[dtype]
    allowed = NEIGHBOURS[dtype] * magnitude.float() + limits["atol"]
    allowed = allowed + limits["rtol"] * expected.float().abs()
    error = (actual.float() - expected.float()).abs()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert not (error > allowed).any(), f"{(error - allowed).nan_to_num().max()} too much"


def check_add(case: LoraCase, stored: torch.Tensor) -> None:
    buffer = case.y._base
    assert buffer is not None
    expected_buffer, actual_buffer = buffer.clone(), buffer.clone()
    expected, actual = case.view_of(expected_buffer), case.view_of(actual_buffer)
    delta = LoraDelta(stored, case.row_slot, case.table, CELL)
    lora_add(expected, delta)
    assert lora_add_triton(actual, delta) is actual
    torch.testing.assert_close(actual, expected, **ROUNDING[case.y.dtype])
    live = case.row_slot >= 0
    assert torch.equal(actual[~live], case.y[~live])
    actual[live] = expected[live]
    assert torch.equal(actual_buffer, expected_buffer)
