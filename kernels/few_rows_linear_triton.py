"""kernels.few_rows_linear in Triton: a program reads a few rows of the weight from end to end.

As a programmatic dependent launch it asks for its first part of the weight before the launch ahead
of it has ended, which a library's GEMM does not do.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kernels.few_rows_linear import MAX_ROWS, FewRowsScratch

#: tl.dot's fewest rows
DOT_ROWS = 16

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class FewRowsTuning:
    """Args: block_n, rows of the weight a program; block_k, numbers of each at a time; splits,
    parts of each row, summed by the program that comes last, in their order."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    splits: int = 1


#: first values, not tuned; few registers, so that adapters' kernels find room beside it
STANDING = FewRowsTuning(16, 256, 4, 5)
CANDIDATES_FEW = (
    STANDING,
    FewRowsTuning(16, 512, 4, 4),
    FewRowsTuning(32, 256, 4, 4),
    FewRowsTuning(32, 512, 8, 3),
    FewRowsTuning(64, 128, 4, 4),
    FewRowsTuning(16, 256, 2, 6),
)
#: of more than DOT_ROWS rows
CANDIDATES = (
    FewRowsTuning(32, 128, 4, 5),
    FewRowsTuning(32, 64, 4, 8),
    FewRowsTuning(64, 64, 4, 6),
    FewRowsTuning(128, 64, 4, 5),
    FewRowsTuning(64, 64, 4, 6, 2),
    FewRowsTuning(64, 64, 4, 6, 4),
    FewRowsTuning(128, 64, 4, 5, 4),
)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def few_rows_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    out,
    parts,
    arrived,
    num_rows,
    num_columns,
    width,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    CAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (n, s): columns n · BLOCK_N … of all rows, part s of the inputs."""
    split = tl.program_id(1)
    part_width = tl.cdiv(tl.cdiv(width, SPLITS), BLOCK_K) * BLOCK_K
    begin = split * part_width
    end = tl.minimum(begin + part_width, width)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    ks = begin + tl.arange(0, BLOCK_K)
    real_columns = columns < num_columns
    weight_at = weight + columns.to(tl.int64)[:, None] * width + ks[None, :]
    x_at = x + rows[:, None] * width + ks[None, :]
    # the weight is not written by any launch: its first part may come early
    first = tl.load(weight_at, mask=real_columns[:, None] & (ks < end)[None, :], other=0.0)
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    here = tl.load(x_at, mask=(rows < num_rows)[:, None] & (ks < end)[None, :], other=0.0)
    if CAST:
        first, here = first.to(tl.float32), here.to(tl.float32)
    total = tl.dot(here, first.T, input_precision=PRECISION)
    for k in range(BLOCK_K, part_width, BLOCK_K):
        inside = k + ks < end
        part = tl.load(weight_at + k, mask=real_columns[:, None] & inside[None, :], other=0.0)
        here = tl.load(x_at + k, mask=(rows < num_rows)[:, None] & inside[None, :], other=0.0)
        if CAST:
            part, here = part.to(tl.float32), here.to(tl.float32)
        total = tl.dot(here, part.T, total, input_precision=PRECISION)
    numbers = rows[:, None] * num_columns + columns[None, :]
    mask = (rows < num_rows)[:, None] & real_columns[None, :]
    if SPLITS > 1:
        size = num_rows * num_columns
        tl.store(parts + split * size + numbers, total, mask=mask)
        # every thread's part is written before the count says so
        tl.debug_barrier()
        before = tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if before == SPLITS - 1:
            tl.store(arrived + tl.program_id(0), 0)
            # past the first-level cache, which other programs' writes do not reach
            total = tl.load(parts + numbers, mask=mask, other=0.0, cache_modifier=".cg")
            for part in tl.static_range(1, SPLITS):
                here_at = parts + part * size + numbers
                total += tl.load(here_at, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(out + numbers, total.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + numbers, total.to(out.dtype.element_ty), mask=mask)


def few_rows_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scratch: FewRowsScratch | None = None,
    *,
    tuning: FewRowsTuning = STANDING,
    pdl: bool = False,
) -> torch.Tensor:
    """`kernels.few_rows_linear.few_rows_linear` in Triton: same arguments, same result to fp32
    rounding.

    pdl: a programmatic dependent launch; the weight must be older than the launches before it.
    """
    (num_rows, width), num_columns = x.shape, weight.shape[0]
    assert num_rows <= MAX_ROWS, num_rows
    blocks = triton.cdiv(num_columns, tuning.block_n)
    parts = arrived = out
    if tuning.splits > 1:
        assert scratch is not None
        parts, arrived = scratch.parts, scratch.arrived
        assert parts.numel() >= tuning.splits * out.numel()
        assert arrived.numel() >= blocks
    launch: Any = few_rows_kernel[(blocks, tuning.splits)]
    launch(
        x,
        weight,
        out,
        parts,
        arrived,
        num_rows,
        num_columns,
        width,
        ROWS=max(DOT_ROWS, triton.next_power_of_2(num_rows)),
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        SPLITS=tuning.splits,
        PRECISION="tf32x3" if x.dtype == torch.float32 and not INTERPRETED else "ieee",
        CAST=INTERPRETED and x.dtype == torch.bfloat16,
        PDL=pdl,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
