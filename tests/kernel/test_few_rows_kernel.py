"""A linear of few rows in Triton against its plain-torch reference.

On a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU (test_interpreter.py).
"""

from __future__ import annotations

import os

import pytest
import torch

from kernels.few_rows_linear import MAX_ROWS, FewRowsScratch, few_rows_linear
from kernels.few_rows_linear_triton import FewRowsTuning, few_rows_linear_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
#: the rounding of sums to the compute dtype; the interpreter cuts bf16 off instead of rounding
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: (N, K): whole blocks, and none
SHAPES = [(96, 512), (40, 72), (33, 1000)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("columns", "width"), SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 33, MAX_ROWS])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("pdl", [False] if INTERPRETED else [False, True])
def test_every_number_of_rows_equals_the_reference(
    rows: int, columns: int, width: int, dtype: torch.dtype, pdl: bool, splits: int
) -> None:
    generator = torch.Generator().manual_seed(rows + columns)
    # rows behind the last one must not be read
    x = torch.full((rows + 1, width), torch.nan, dtype=dtype)
    x[:rows] = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.full((columns + 1, width), torch.nan, dtype=dtype)
    weight[:columns] = torch.randn(columns, width, generator=generator).to(dtype)
    expected = torch.full((rows, columns), torch.nan, dtype=dtype)
    few_rows_linear(x[:rows], weight[:columns], expected)
    out = torch.full((rows + 1, columns), torch.nan, dtype=dtype, device=DEVICE)
    parts = torch.full((splits * rows * columns,), torch.nan, device=DEVICE)
    scratch = FewRowsScratch(parts, torch.zeros(9, dtype=torch.int32, device=DEVICE))
    for _ in range(2):
        few_rows_linear_triton(
            x.to(DEVICE)[:rows], weight.to(DEVICE)[:columns], out[:rows], scratch,
            tuning=FewRowsTuning(32, 64, 4, 3, splits), pdl=pdl,
        )  # fmt: skip
    assert not scratch.arrived.any()
    found = out.cpu().float()
    assert found[rows].isnan().all()
    error = (found[:rows] - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[dtype]
