"""A branch beside the main stream: what runs between `mark` and `join` may overlap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine_svc.model.gpu.cuda import MAIN_PRIORITY, new_event, new_stream
from kernels.gemm_processors import gemm_processors
from kernels.lora_site_tuning import LATER, SAME, SOONER, SiteTuning


class Branch:
    """Side streams, forked and joined by events, so that a capture becomes a forked graph.

    On a CPU the branch runs at once, in the order of the calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.Stream] = {}
        if device.type == "cuda":
            self._streams = {
                priority: new_stream(device, MAIN_PRIORITY + priority)
                for priority in (SOONER, SAME, LATER)
            }
            self._forked, self._done = new_event(), new_event()

    def run(
        self,
        tuning: SiteTuning,
        shrink: Callable[[], None],
        expand: Callable[[], None],
        gemm: Callable[[], None],
    ) -> None:
        """Launch a site's three parts in the tuned order; the main stream goes on after all."""
        if tuning.order == "after":
            self._gemm(tuning, gemm)
            shrink()
            expand()
            return
        self.mark()
        if tuning.order == "GEMM":
            self._gemm(tuning, gemm)
        with self.beside(tuning.priority):
            shrink()
            expand()
        if tuning.order != "GEMM":
            self._gemm(tuning, gemm)
        self.join()

    def _gemm(self, tuning: SiteTuning, gemm: Callable[[], None]) -> None:
        with gemm_processors(tuning.processors, self._device):
            gemm()

    def mark(self) -> None:
        """What `beside` comes after: all that the main stream has so far."""
        if self._streams:
            self._forked.record()

    @contextmanager
    def beside(self, priority: int = SOONER) -> Iterator[None]:
        """Launches inside go to the branch, once after a mark. Args: priority, SOONER, SAME or
        LATER than the main stream, where both could start."""
        if not self._streams:
            yield
            return
        stream = self._streams[priority]
        stream.wait_event(self._forked)
        with torch.cuda.stream(stream):
            yield
            self._done.record()

    def join(self) -> None:
        """The main stream goes on after the branch."""
        if self._streams:
            torch.cuda.current_stream().wait_event(self._done)
