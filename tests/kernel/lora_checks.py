"""Runs a Triton kernel and its reference on one case and compares every byte around the result."""

from __future__ import annotations

import torch

from kernels.lora_expand import lora_expand
from kernels.lora_expand_triton import lora_expand_triton
from kernels.lora_shrink import lora_shrink
from kernels.lora_shrink_triton import lora_shrink_triton
from tests.kernel.lora_case import CELL, FIRST_ENTRY, LoraCase

#: fp32 sums of a few hundred products of size one, in two orders
SUM_TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
#: one rounding to y's dtype; two neighbours at most one unit in the last place apart
ROUNDING = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 2**-12},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9},
}


def check_shrink(case: LoraCase) -> torch.Tensor:
    """Returns the reference's output."""
    num_slices = case.columns.num_slices
    arguments = (case.x, case.table, case.plan, FIRST_ENTRY, num_slices)
    expected = lora_shrink(*arguments, case.empty_u())
    out = case.empty_u()
    assert lora_shrink_triton(*arguments, out) is out
    torch.testing.assert_close(out, expected, equal_nan=True, **SUM_TOLERANCE)
    # what the reference leaves alone stays NaN: base rows, and columns at and above a rank
    assert torch.equal(out.isnan(), expected.isnan())
    return expected


def check_expand(case: LoraCase, u: torch.Tensor) -> None:
    buffer = case.y._base
    assert buffer is not None
    expected_buffer, actual_buffer = buffer.clone(), buffer.clone()
    expected, actual = (
        torch.as_strided(b, case.y.shape, case.y.stride(), case.y.storage_offset())
        for b in (expected_buffer, actual_buffer)
    )
    arguments = (u, case.table, case.plan, FIRST_ENTRY, case.columns, CELL)
    lora_expand(*arguments, expected)
    assert lora_expand_triton(*arguments, actual) is actual
    torch.testing.assert_close(actual, expected, **ROUNDING[case.y.dtype])
    live = torch.zeros(case.y.shape[0], dtype=torch.bool)
    for first_row, num_rows, _ in case.plan.segments:
        live[first_row : first_row + num_rows] = True
    live = live.to(case.y.device)
    assert torch.equal(actual[~live], case.y[~live])
    actual[live] = expected[live]
    assert torch.equal(actual_buffer, expected_buffer)
