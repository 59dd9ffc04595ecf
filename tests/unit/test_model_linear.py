"""Projections on a CPU: the same numbers as torch's own, from a bounded set of shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine_svc.model.linear import Linear, row_blocks

#: kernels that oneDNN may make for one weight; each keeps about half a megabyte for ever
MOST_SHAPES = 24


def test_blocks_cover_every_row_once_with_few_shapes() -> None:
    shapes = set()
    for num_rows in range(1, 2049):
        row = 0
        for first, count, padded in row_blocks(num_rows):
            assert first == row
            assert 1 <= count <= padded
            row += count
            shapes.add(padded)
        assert row == num_rows
    assert len(shapes) <= MOST_SHAPES


def test_few_rows_are_not_padded() -> None:
    assert [row_blocks(rows) for rows in (1, 3, 8)] == [((0, 1, 1),), ((0, 3, 3),), ((0, 8, 8),)]


@pytest.mark.parametrize("num_rows", [0, 1, 7, 9, 63, 127, 128, 129, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_projection_equals_torch(num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(40, 24, generator=generator)
    bias = torch.randn(40, generator=generator) if has_bias else None
    x = torch.randn(num_rows, 24, generator=generator)
    y = Linear(weight, bias)(x)
    assert y.shape == (num_rows, 40)
    torch.testing.assert_close(y, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
