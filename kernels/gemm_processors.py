"""How many multiprocessors a base GEMM may take; the others are free for what runs beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

#: names of the library that torch has loaded, newest first
LIBRARIES = ("libcublas.so.13", "libcublas.so.12")


@contextmanager
def gemm_processors(count: int, device: torch.device) -> Iterator[None]:
    """cuBLAS chooses its algorithms for `count` multiprocessors inside, for all again afterwards.

    Acts on this thread's handle at a launch or a capture; a replay keeps what was chosen.
    No effect where the device has no more than `count`, on a CPU, and where cuBLAS is not found.

    Args: count, 0: all.
    """
    if not count or device.type != "cuda" or count >= _processors(device) or not _library():
        yield
        return
    _set_target(count)
    try:
        yield
    finally:
        _set_target(0)


def _set_target(count: int) -> None:
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    status = _library().cublasSetSmCountTarget(handle, ctypes.c_int(count))  # type: ignore[union-attr]
    if status != 0:
        raise RuntimeError(f"cublasSetSmCountTarget({count}) is {status}; 0 is success")


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _library() -> ctypes.CDLL | None:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
