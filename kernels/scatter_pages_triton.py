"""kernels.scatter_pages on the GPU: one program a block of updates."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit  # type: ignore[untyped-decorator]
def scatter_pages_kernel(updates, num_updates, page_table, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < tl.load(num_updates)
    index = tl.load(updates + 2 * at, mask=live, other=0)
    page = tl.load(updates + 2 * at + 1, mask=live, other=0)
    tl.store(page_table + index.to(tl.int64), page, mask=live)


def scatter_pages_triton(
    updates: torch.Tensor, num_updates: torch.Tensor, page_table: torch.Tensor
) -> None:
    """`kernels.scatter_pages.scatter_pages` in Triton; the grid depends on the capacity alone."""
    grid = (triton.cdiv(updates.shape[0], BLOCK),)
    if updates.shape[0] == 0:
        return
    launch: Any = scatter_pages_kernel[grid]
    launch(updates, num_updates, page_table, BLOCK=BLOCK)
