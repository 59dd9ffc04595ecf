"""A linear of few rows, limited by reading its weight. Plain-torch reference, and the choice by
device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: rows that one product of the kernel holds
MAX_ROWS = 64
#: rows up to which the trunk takes it
FASTER_ROWS = 16


@dataclass(frozen=True, slots=True)
class FewRowsScratch:
    """Where parts of split sums wait; one serves launches that follow each other.

    Args:
        parts: [n] fp32.
        arrived: [m] int32; zeros between launches, each launch leaves them so.
    """

    parts: torch.Tensor
    arrived: torch.Tensor


def few_rows_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    scratch: FewRowsScratch | None = None,
) -> torch.Tensor:
    """Semantics: out[t, n] = Σ_k x[t, k] · weight[n, k], summed in fp32.

    Args:
        x: [T, K] compute dtype, contiguous, T ≤ MAX_ROWS.
        weight: [N, K] compute dtype, contiguous.
        out: [T, N] compute dtype, contiguous.
        scratch: on a GPU, where the tuning splits sums.

    Returns: out.
    """
    if x.is_cuda:
        from kernels.few_rows_linear_triton import few_rows_linear_triton

        return few_rows_linear_triton(x, weight, out, scratch)
    return out.copy_(x.float() @ weight.float().t())
