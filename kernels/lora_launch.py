"""What a launch of the LoRA kernels asks of the device."""

from __future__ import annotations

from functools import cache

import torch

#: whole numbers that differ between layers and tables: no compiled variant for any value of them
TABLE_NUMBERS = (
    "first_entry", "cell", "num_entries", "num_blocks", "num_cells", "capacity", "few_rows",
)  # fmt: skip


def overlaps(x: torch.Tensor) -> bool:
    """The kernel may begin before the one before it has ended (programmatic dependent launch)."""
    return x.device.type == "cuda" and _capability(x.device) >= (9, 0)


def cast_for_dot(x: torch.Tensor) -> bool:
    """Products are of fp32 operands: the interpreter's bf16 product is wrong."""
    return x.device.type == "cpu"


def num_programs(x: torch.Tensor, wanted: int) -> int:
    """Programs of a persistent grid; few where the interpreter runs them one after another."""
    return min(wanted, 4) if x.device.type == "cpu" else wanted


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
