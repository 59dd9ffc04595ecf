"""kernels.add_rms_norm in Triton: one program a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.add_delta_triton import add_delta, delta_arguments, row_delta
from kernels.lora_tables import LoraDelta

#: numbers that a thread holds: one 16-byte load of each half-precision operand when rows are few,
#: and the waiting is all there is; more of them in flight when there are many
FEW_ROWS, FEW, MANY = 512, 8, 16


@triton.jit(do_not_specialize=["cell", "num_cells"])  # type: ignore[untyped-decorator]
def add_rms_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    delta,
    row_slot,
    live,
    g_off,
    arena,
    cell,
    num_cells,
    delta_stride,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    EAGER: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_C)
    inside = columns < C
    # what no kernel of this step writes comes before the wait
    gain_weight = tl.load(weight + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        has_delta, gain = row_delta(row, row_slot, live, g_off, cell, num_cells)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    residual_at = residual + row * residual_stride + columns
    y = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta_at = delta + row * delta_stride + columns
        y = add_delta(y, delta_at, columns, inside, has_delta, gain, arena, EAGER, OFFSET_UNIT)
    rounded = (before + y).to(residual.dtype.element_ty)
    tl.store(residual_at, rounded, mask=inside)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / C + eps)
    result = total * scale * gain_weight.to(tl.float32)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


def add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    delta: LoraDelta | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """`kernels.add_rms_norm.add_rms_norm` in Triton: same arguments, same result to fp32 rounding
    before each rounding to the compute dtype.

    pdl: a programmatic dependent launch: may start while the kernel before it ends.
    """
    num_rows, width = x.shape
    if num_rows == 0:
        return out
    block = triton.next_power_of_2(width)
    numbers = FEW if num_rows <= FEW_ROWS else MANY
    launch: Any = add_rms_norm_kernel[(num_rows,)]
    launch(
        x,
        residual,
        weight,
        out,
        eps,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        C=width,
        BLOCK_C=block,
        PDL=pdl,
        num_warps=min(max(block // (32 * numbers), 1), 16),
        **({"launch_pdl": True} if pdl else {}),
        **delta_arguments(delta, x),
    )
    return out
