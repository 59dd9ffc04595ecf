"""The smallest consumer of a site's output: reads y, adds a delta where there is one, writes."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lora_tables import LoraDelta

BLOCK_N = 1024


@triton.jit(do_not_specialize=["cell", "num_cells"])  # type: ignore[untyped-decorator]
def consume_kernel(  # type: ignore[no-untyped-def]
    y, out, delta, row_slot, live_at, cell, num_cells, num_columns,
    BLOCK_N: tl.constexpr, WITH_DELTA: tl.constexpr,
):  # fmt: skip
    """Program (t, b): row t, block b of the columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < num_columns
    at = row * num_columns + columns
    total = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    if WITH_DELTA:
        slot = tl.load(row_slot + row).to(tl.int64)
        at_cell = live_at + slot * num_cells + cell
        if tl.load(at_cell, mask=slot >= 0, other=0) != 0:
            total += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def consume(y: torch.Tensor, delta: LoraDelta | None, out: torch.Tensor) -> None:
    """out [T, N] ← y [T, N] (+ delta); all contiguous."""
    num_rows, num_columns = y.shape
    launch: Any = consume_kernel[(num_rows, triton.cdiv(num_columns, BLOCK_N))]
    launch(
        y,
        out,
        delta.delta if delta else y,
        delta.row_slot if delta else y,
        delta.table.live if delta else y,
        delta.cell if delta else 0,
        delta.table.live.shape[1] if delta else 0,
        num_columns,
        BLOCK_N=BLOCK_N,
        WITH_DELTA=delta is not None,
        num_warps=4,
    )
