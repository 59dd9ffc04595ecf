"""Add on the GPU: kernels.lora_add in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lora_launch import TABLE_NUMBERS
from kernels.lora_tables import OFFSET_UNIT, LoraDelta

#: eight columns a thread
BLOCK_N = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=TABLE_NUMBERS)  # type: ignore[untyped-decorator]
def add_kernel(  # type: ignore[no-untyped-def]
    y,
    delta,
    row_slot,
    arena,
    g_off,
    live_at,
    cell,
    num_cells,
    num_columns,
    y_stride,
    delta_stride,
    BLOCK_N: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
):
    """Program (t, b): row t, block b of the columns."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(row_slot + row).to(tl.int64)
    if slot >= 0:
        gain = tl.load(g_off + slot * num_cells + cell)
        is_live = tl.load(live_at + slot * num_cells + cell)
        if (gain >= 0) | (is_live > 0):
            columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = columns < num_columns
            total = tl.load(y + row * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
            if gain >= 0:
                g = (arena + gain * OFFSET_UNIT).to(tl.pointer_type(tl.float32))
                total = total * tl.load(g + columns, mask=inside, other=1.0)
            if is_live != 0:
                added = tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0)
                total += added.to(tl.float32)
            tl.store(y + row * y_stride + columns, total.to(y.dtype.element_ty), mask=inside)


def lora_add_triton(y: torch.Tensor, delta: LoraDelta) -> torch.Tensor:
    """`kernels.lora_add.lora_add` in Triton: same arguments, same result."""
    num_rows, num_columns = y.shape
    if not y.numel():
        return y
    table = delta.table
    launch: Any = add_kernel[(num_rows, triton.cdiv(num_columns, BLOCK_N))]
    launch(
        y,
        delta.delta,
        delta.row_slot,
        table.arena,
        table.g_off,
        table.live,
        delta.cell,
        table.g_off.shape[1],
        num_columns,
        y.stride(0),
        delta.delta.stride(0),
        BLOCK_N=BLOCK_N,
        OFFSET_UNIT=OFFSET_UNIT,
        num_warps=NUM_WARPS,
    )
    return y
