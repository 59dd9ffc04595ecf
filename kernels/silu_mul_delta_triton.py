"""kernels.silu_mul_delta in Triton: one program a row and block of columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.add_delta_triton import add_delta, delta_arguments, row_delta
from kernels.lora_tables import LoraDelta

#: columns a program, by rows: few rows want many programs, many rows want several loads in flight
FEW_ROWS, FEW_BLOCK, MANY_BLOCK = 512, 512, 2048
#: numbers that a thread holds
FEW, MANY = 8, 16


@triton.jit(do_not_specialize=["cell", "num_cells"])  # type: ignore[untyped-decorator]
def silu_mul_delta_kernel(  # type: ignore[no-untyped-def]
    gate_up,
    out,
    gate_up_stride,
    out_stride,
    delta,
    row_slot,
    live,
    g_off,
    arena,
    cell,
    num_cells,
    delta_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    EAGER: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (b, t): block b of row t."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    if HAS_DELTA:
        has_delta, gain = row_delta(row, row_slot, live, g_off, cell, num_cells)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = gate_up + row * gate_up_stride + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta_at = delta + row * delta_stride + columns
        gate = add_delta(
            gate, delta_at, columns, inside, has_delta, gain, arena, EAGER, OFFSET_UNIT
        )
        up = add_delta(
            up, delta_at + WIDTH, columns + WIDTH, inside, has_delta, gain, arena, EAGER,
            OFFSET_UNIT,
        )  # fmt: skip
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def silu_mul_delta_triton(
    gate_up: torch.Tensor,
    out: torch.Tensor,
    delta: LoraDelta | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """`kernels.silu_mul_delta.silu_mul_delta` in Triton: same arguments, same result to fp32
    rounding before the one rounding to the compute dtype.

    pdl: a programmatic dependent launch: may start while the kernel before it ends.
    """
    num_rows, width = out.shape
    if num_rows == 0:
        return out
    few = num_rows <= FEW_ROWS
    block = min(FEW_BLOCK if few else MANY_BLOCK, triton.next_power_of_2(width))
    launch: Any = silu_mul_delta_kernel[(triton.cdiv(width, block), num_rows)]
    launch(
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        WIDTH=width,
        BLOCK=block,
        PDL=pdl,
        num_warps=min(max(block // (32 * (FEW if few else MANY)), 1), 8),
        **({"launch_pdl": True} if pdl else {}),
        **delta_arguments(delta, gate_up),
    )
    return out
