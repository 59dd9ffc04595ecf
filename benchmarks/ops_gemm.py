"""How many multiprocessors the base GEMM may take: cuBLAS is asked for an algorithm for so many."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

#: names of the library that torch has loaded, newest first
LIBRARIES = ("libcublas.so.13", "libcublas.so.12")


@contextmanager
def gemm_processors(count: int) -> Iterator[None]:
    """GEMMs inside are chosen for `count` multiprocessors; 0: for all."""
    if not count:
        yield
        return
    _set_target(count)
    try:
        yield
    finally:
        _set_target(0)


def _set_target(count: int) -> None:
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    status = _library().cublasSetSmCountTarget(handle, ctypes.c_int(count))
    if status != 0:
        raise RuntimeError(f"cublasSetSmCountTarget({count}) is {status}; 0 is success")


@cache
def _library() -> ctypes.CDLL:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise RuntimeError(f"none of {', '.join(LIBRARIES)} can be loaded")
