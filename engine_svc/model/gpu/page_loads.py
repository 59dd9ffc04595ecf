"""Copies page images from the host region into arena pages, beside the steps."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.model.arena import Arena
from engine_svc.model.gpu.cuda import new_event, new_stream

log = logging.getLogger(__name__)

Image = npt.NDArray[np.uint8]
#: torch hands out tensors of up to so many bytes from segments of their own
_SMALL_BYTES = 1 << 20
#: page-locked pages through which images go when the region itself cannot be page-locked
_BOUNCE_PAGES = 4
_runtime: Any = torch.cuda.cudart


class PageLoads:
    """One side stream. Used on the slot writer's thread alone, after `lock`."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self._arena, self._device = arena, device
        self._stream = new_stream(device)
        #: blocking: the thread sleeps, the core's loop keeps its processor
        self._done = new_event(blocking=True)
        self._locked = False
        self._locking: Callable[[], None] = lambda: None
        self._unlock: Callable[[], object] = lambda: None
        shape = (_BOUNCE_PAGES, arena.page_bytes)
        self._bounce = torch.zeros(shape, dtype=torch.uint8, pin_memory=True)
        self._sent = [new_event(blocking=True) for _ in range(_BOUNCE_PAGES)]

    def unlock(self) -> None:
        """The region is not read any more."""
        self._locking()
        self._locked = False
        self._unlock()

    def reserve(self, num_bytes: int, small_bytes: int) -> None:
        """Have torch keep device memory for work on this stream, and cuBLAS what it wants for this
        thread. Args: small_bytes, of tensors that are small to torch; num_bytes, of others."""
        with self.stream():
            # cuBLAS keeps its workspace: it must not be a part of what is given back below
            product = torch.ones(8, 8, device=self._device)
            torch.addmm(product, product, product)
            kept = [
                torch.empty(size, dtype=torch.uint8, device=self._device)
                for size in (num_bytes, *[_SMALL_BYTES] * -(-small_bytes // _SMALL_BYTES))
            ]
            del kept

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def lock(self, region: mmap.mmap) -> None:
        """Begin to page-lock the whole mapping, so that copies read it directly; the first `write`
        waits for it. If that fails copies go through page-locked pages of our own instead."""
        address = np.frombuffer(region, np.uint8).ctypes.data
        found: list[int] = []

        def register() -> None:
            torch.cuda.set_device(self._device.index or 0)
            found.append(int(_runtime().cudaHostRegister(address, len(region), 0)))

        # a thread of its own: a refusal stays its last error, not that of launches
        thread = threading.Thread(target=register, name="host-register")
        thread.start()

        def wait() -> None:
            thread.join()
            self._locking = lambda: None
            self._locked = found == [0]
            if self._locked:
                # before the mapping goes: what CUDA takes for locked must not be mapped anew
                unlock = weakref.finalize(self, _unregister, address, region)
                unlock.atexit = False
                self._unlock = unlock
                return
            log.warning(
                "host_region.not_page_locked",
                extra={"num_bytes": len(region), "cuda_error": found[0] if found else -1},
            )

        self._locking = wait

    def wait_for_lock(self) -> bool:
        """Whether copies read the region directly."""
        self._locking()
        return self._locked

    def write(self, page_ids: Sequence[int], images: Image) -> None:
        """Start copying images [pages · page_bytes] into pages; `finish` waits."""
        size = self._arena.page_bytes
        is_locked = self.wait_for_lock()
        with self.stream():
            if is_locked:
                for at, first, count in _runs(page_ids):
                    source = torch.from_numpy(images[at * size : (at + count) * size])
                    target = self._arena.bytes[first * size : (first + count) * size]
                    target.copy_(source, non_blocking=True)
                return
            for at, page_id in enumerate(page_ids):
                index = at % _BOUNCE_PAGES
                self._sent[index].synchronize()
                np.copyto(self._bounce[index].numpy(), images[at * size : (at + 1) * size])
                self._arena.page(page_id).copy_(self._bounce[index], non_blocking=True)
                self._sent[index].record()

    def finish(self) -> None:
        """Wait for everything on the side stream."""
        self._done.record(self._stream)
        self._done.synchronize()


def _unregister(address: int, region: mmap.mmap) -> None:
    """`region` is mapped until this has run."""
    _runtime().cudaHostUnregister(address)


def _runs(page_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """(index of the first, first page, pages) of runs of consecutive pages."""
    runs: list[tuple[int, int, int]] = []
    for at, page in enumerate(page_ids):
        if runs and runs[-1][1] + runs[-1][2] == page:
            begin, first, count = runs.pop()
            runs.append((begin, first, count + 1))
        else:
            runs.append((at, page, 1))
    return runs
