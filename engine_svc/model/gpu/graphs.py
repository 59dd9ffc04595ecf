"""Captured steps: launches recorded once before serving, replayed with new inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Which launches a step needs. `rows`: padded."""

    rows: int
    has_prompts: bool
    with_lora: bool


class StepGraphs:
    """CUDA graphs by key. They share one memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool: object = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def capture(self, key: GraphKey, launch: Callable[[], object]) -> None:
        """Record what `launch` enqueues on the current stream. It must have run before, so that
        everything is compiled and loaded."""
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            launch()
        self._pool = graph.pool()
        self._graphs[key] = graph

    def replay(self, key: GraphKey) -> None:
        self._graphs[key].replay()
