"""The one stream on which steps are ordered, and how long they take there."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from engine_svc.model.gpu.cuda import MAIN_PRIORITY, new_event, new_stream


@dataclass(slots=True)
class Timing:
    """Of one step: events on a GPU, host seconds on a CPU."""

    index: int
    begun_s: float = 0.0
    seconds: float = 0.0


class Timeline:
    """A stream of its own on a GPU, whose events bracket the steps; a CPU runs inside the calls."""

    def __init__(self, device: torch.device, max_in_flight: int) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._next = 0
        if device.type == "cuda":
            self._stream = new_stream(device, MAIN_PRIORITY)
            self._events = [
                (new_event(timing=True), new_event(timing=True)) for _ in range(max_in_flight + 1)
            ]

    def stream(self) -> AbstractContextManager[object]:
        """Work inside is ordered after all work inside earlier ones."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin(self) -> Timing:
        """Inside `stream`: a step begins."""
        timing = Timing(self._next, time.perf_counter())
        if self._events:
            self._next = (self._next + 1) % len(self._events)
            self._events[timing.index][0].record()
        return timing

    def end(self, timing: Timing) -> None:
        """Inside `stream`: the step's last launch is behind us."""
        if self._events:
            self._events[timing.index][1].record()
        else:
            timing.seconds = time.perf_counter() - timing.begun_s

    def seconds(self, timing: Timing) -> float:
        """How long the step ran on the device; waits for its end."""
        if not self._events:
            return timing.seconds
        begin, end = self._events[timing.index]
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def wait(self) -> None:
        """Until the device has done everything, on this stream and on others."""
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)
