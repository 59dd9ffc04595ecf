"""Times work on a device: CUDA graphs with interleaved replays, or plain calls on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from engine_svc.model.gpu.cuda import MAIN_PRIORITY
from kernels.lora_site_tuning import LATER, SAME, SOONER

Work = Callable[[], None]
#: more than an H200's second-level cache holds
FLUSH_BYTES = 160 << 20


class Clock(Protocol):
    """What a benchmark asks of the device it measures."""

    device: torch.device

    def times_us(self, works: Sequence[Work], repeats: int) -> list[list[float]]:
        """Each work's times, run in turn so that clock drift meets all alike."""
        ...

    def run(self, work: Work) -> None:
        """Run the work once, as it is measured, and wait for it."""
        ...

    def mark(self) -> None:
        """What `beside` starts with."""
        ...

    def beside(self, priority: int = SOONER) -> AbstractContextManager[None]:
        """Work inside starts with what was queued at the mark; `join` waits for it."""
        ...

    def join(self) -> None: ...

    def flush(self) -> None:
        """Put other bytes into the caches."""
        ...


class HostClock:
    """A CPU: for dry runs. Numbers mean nothing."""

    device = torch.device("cpu")

    def times_us(self, works: Sequence[Work], repeats: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in works]
        for _ in range(repeats):
            for work, mine in zip(works, times, strict=True):
                start = time.perf_counter()
                work()
                mine.append((time.perf_counter() - start) * 1e6)
        return times

    def run(self, work: Work) -> None:
        work()

    def mark(self) -> None: ...

    def beside(self, priority: int = SOONER) -> AbstractContextManager[None]:
        return nullcontext()

    def join(self) -> None: ...

    def flush(self) -> None: ...


class CudaClock:
    """A GPU: every work is one captured graph."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self._main = torch.cuda.Stream(priority=MAIN_PRIORITY)  # type: ignore[no-untyped-call]
        self._sides = {
            priority: torch.cuda.Stream(priority=MAIN_PRIORITY + priority)  # type: ignore[no-untyped-call]
            for priority in (SOONER, SAME, LATER)
        }
        self._side = self._sides[SOONER]
        self._mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._other_bytes = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)

    def times_us(self, works: Sequence[Work], repeats: int) -> list[list[float]]:
        graphs = [self._captured(work) for work in works]
        pairs = [[_events() for _ in range(repeats)] for _ in graphs]
        with torch.cuda.stream(self._main):
            for graph in graphs:
                graph.replay()
            for index in range(repeats):
                for graph, mine in zip(graphs, pairs, strict=True):
                    mine[index][0].record(self._main)
                    graph.replay()
                    mine[index][1].record(self._main)
        torch.cuda.synchronize()
        return [[start.elapsed_time(end) * 1e3 for start, end in mine] for mine in pairs]

    def run(self, work: Work) -> None:
        graph = self._captured(work)
        with torch.cuda.stream(self._main):
            graph.replay()
        torch.cuda.synchronize()

    def _captured(self, work: Work) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._main):
            work()  # compiles what is not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # not `torch.cuda.graph`: it collects garbage each time
        with torch.cuda.stream(self._main):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def mark(self) -> None:
        self._mark.record(self._main)

    def beside(self, priority: int = SOONER) -> AbstractContextManager[None]:
        self._side = self._sides[priority]
        self._side.wait_event(self._mark)
        return torch.cuda.stream(self._side)

    def join(self) -> None:
        self._main.wait_stream(self._side)

    def flush(self) -> None:
        torch.sum(self._other_bytes)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end
