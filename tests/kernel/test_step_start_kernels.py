"""Embeddings and page table updates in Triton against their plain-torch references.

On a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU (test_interpreter.py).
"""

from __future__ import annotations

import os

import pytest
import torch

from kernels.embed_rows import embed_rows
from kernels.embed_rows_triton import embed_rows_triton
from kernels.scatter_pages import scatter_pages
from kernels.scatter_pages_triton import scatter_pages_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
#: of the embedding and of the output; the interpreter cuts bf16 off instead of rounding
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
] + ([] if INTERPRETED else [(torch.float32, torch.bfloat16)])


@pytest.mark.parametrize(("stored", "dtype"), DTYPES)
@pytest.mark.parametrize("last_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (7, 1024), (5, 1500), (33, 20)])
def test_rows_are_the_tokens_named_or_the_seats_last_and_padding_is_zero(
    rows: int,
    width: int,
    last_dtype: torch.dtype,
    stored: torch.dtype,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(rows)
    embedding = torch.randn(50, width, generator=generator).to(stored)
    last = torch.randint(0, 50, (9,), generator=generator).to(last_dtype)
    tokens = torch.randint(0, 50, (rows,), generator=generator, dtype=torch.int32)
    tokens[1::3] = -1
    seats = torch.randint(0, 9, (rows,), generator=generator, dtype=torch.int32)
    seats[2::4] = -1
    results = []
    for device in ("cpu", DEVICE):
        poisoned = torch.full((rows, 2 * width), torch.nan, dtype=dtype, device=device)
        out, residual = poisoned[:, :width], poisoned[:, width:]
        inputs = [x.to(device) for x in (tokens, seats, last, embedding)]
        # the first time the reference, which a CPU is given
        op = embed_rows if not results else embed_rows_triton
        op(*inputs, out, residual)
        results.append(poisoned.cpu())
    expected, found = results
    assert torch.equal(expected, found)
    assert not found.isnan().any()
    assert not found[:, width:].any()
    assert found[0, :width].any(), "not a row of padding"


@pytest.mark.parametrize(("live", "capacity"), [(0, 5), (1, 1), (300, 512), (512, 512), (7, 1000)])
def test_live_updates_are_written_and_no_other_entry_changes(live: int, capacity: int) -> None:
    generator = torch.Generator().manual_seed(capacity)
    table = torch.randint(0, 99, (13, 100), generator=generator, dtype=torch.int32)
    index = torch.randperm(table.numel(), generator=generator)[:capacity].int()
    page = torch.randint(100, 200, (capacity,), generator=generator, dtype=torch.int32)
    updates, count = torch.stack((index, page), dim=1), torch.tensor([live], dtype=torch.int32)
    # entries behind the live ones are an older step's
    updates[live:, 0] = 10**6
    expected = table.clone()
    scatter_pages(updates, count, expected)
    found = table.clone().to(DEVICE)
    scatter_pages_triton(updates.to(DEVICE), count.to(DEVICE), found)
    assert torch.equal(expected, found.cpu())
    assert int((expected != table).sum()) == live
