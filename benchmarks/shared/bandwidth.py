"""The bandwidth that floors are taken against: a large copy within a device's memory."""

from __future__ import annotations

import statistics
import time

import torch

#: far more than caches hold; on a CPU only so much that a dry run passes
COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
ROUNDS = 9


def copy_bytes_per_s(device: torch.device | str) -> float:
    """Bytes read plus bytes written a second: the median of a few copies.

    Not a replayed graph: there the driver may copy in another, slower way (measured on an H200:
    2.7 TB/s for a copy inside a graph, 4.2 for the same copy as a plain call).
    """
    device = torch.device(device)
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = []
    for _ in range(ROUNDS):
        _finish(device)
        began = time.perf_counter()
        target.copy_(source)
        _finish(device)
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / statistics.median(seconds)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
