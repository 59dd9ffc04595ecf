"""What changed in the page tables of a step's seats, written on the device. Plain-torch reference
and dispatch by device."""

from __future__ import annotations

import torch


def scatter_pages(
    updates: torch.Tensor, num_updates: torch.Tensor, page_table: torch.Tensor
) -> None:
    """Semantics: page_table.flat[updates[i, 0]] = updates[i, 1] for i < num_updates[0].

    Args:
        updates: [capacity, 2] int32, (index into the flat table, page); no index occurs twice.
            Entries at and after num_updates[0] are not read.
        num_updates: [1] int32.
        page_table: [seats, max_pages] int32, contiguous; changed in place.
    """
    if page_table.device.type == "cuda":
        # Triton is not installed where there is no GPU to use it
        from kernels.scatter_pages_triton import scatter_pages_triton

        scatter_pages_triton(updates, num_updates, page_table)
        return
    live = updates[: int(num_updates[0])].long()
    page_table.view(-1)[live[:, 0]] = live[:, 1].int()
