"""What a launch of the LoRA kernels asks of the device."""

from __future__ import annotations

from functools import cache

import torch


def overlaps(x: torch.Tensor) -> bool:
    """The kernel may begin before the one before it has ended (programmatic dependent launch)."""
    return x.device.type == "cuda" and _capability(x.device) >= (9, 0)


def cast_for_dot(x: torch.Tensor) -> bool:
    """Products are of fp32 operands: the interpreter's bf16 product is wrong."""
    return x.device.type == "cpu"


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
