"""A Triton kernel with a mistake, to show that a memory checker would see one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def overrun_kernel(out, count, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 1.0, mask=at <= count)


def write_one_too_many(out: torch.Tensor) -> None:
    """Writes `out` and the number behind it. Args: out [N] fp32 on a GPU."""
    overrun_kernel[(triton.cdiv(out.numel() + 1, 256),)](out, out.numel(), BLOCK=256)
