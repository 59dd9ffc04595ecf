"""What the device can do and what it holds: measured before the arena takes the memory."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_svc.model.device import device_of

log = logging.getLogger(__name__)

#: larger than any cache, small beside any GPU
COPY_BYTES = 256 << 20
_MATRIX = 4096
_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Of large calls, medians. `bytes_per_s` counts bytes read and written by a copy;
    `flops_per_s` is of a bf16 matrix product."""

    bytes_per_s: float
    flops_per_s: float


def measure_rates(device: str) -> DeviceRates | None:
    """A few milliseconds; None on a CPU, whose caches make both numbers a matter of size, and on a
    GPU that has no memory for it.

    Args: device, as in the settings: auto, cpu or cuda.
    """
    if device_of(device).type == "cpu":
        return None
    try:
        copy_s = _copy_s()
        # before the product: cuBLAS keeps a workspace, and with it all of the block that it lies in
        torch.cuda.empty_cache()
        product_s = _product_s()
    except torch.OutOfMemoryError as error:
        log.warning("device.not_measured", extra={"error": str(error).partition("\n")[0]})
        return None
    finally:
        torch.cuda.empty_cache()
    return DeviceRates(2 * COPY_BYTES / copy_s, 2 * _MATRIX**3 / product_s)


def runtime_bytes(device: str, known_bytes: int) -> int:
    """Memory in use on the device beyond `known_bytes`: the context, kernels, graphs and
    libraries, and whatever other programs hold; 0 on a CPU."""
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return max(0, total - free - known_bytes)


def _copy_s() -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return _median_s(lambda: target.copy_(source))


def _product_s() -> float:
    # random numbers: a product of zeros is faster than any that serves
    a = torch.randn(_MATRIX, _MATRIX, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    return _median_s(lambda: torch.mm(a, a, out=out))


def _median_s(call: Callable[[], object]) -> float:
    seconds: list[float] = []
    for _ in range(_ROUNDS):
        begin, end = (
            torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
            torch.cuda.Event(enable_timing=True),  # type: ignore[no-untyped-call]
        )
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)
