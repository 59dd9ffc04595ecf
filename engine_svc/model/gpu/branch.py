"""A branch beside the main stream: what runs between `fork` and `join` may overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine_svc.model.gpu.cuda import new_event, new_stream

#: lower is sooner: the branch's small kernels start before the remaining blocks of a GEMM
_HIGH_PRIORITY = -1


class Branch:
    """One side stream, forked and joined by events, so that a capture becomes a forked graph.

    On a CPU the branch runs at once, in the order of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = new_stream(device, _HIGH_PRIORITY)
            self._forked, self._done = new_event(), new_event()

    @contextmanager
    def fork(self) -> Iterator[None]:
        """Launches inside go to the branch, after all that the main stream has so far."""
        if self._stream is None:
            yield
            return
        self._forked.record()
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            yield
            self._done.record()

    def join(self) -> None:
        """The main stream goes on after the branch."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._done)
