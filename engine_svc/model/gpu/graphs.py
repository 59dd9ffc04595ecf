"""Captured steps: launches recorded once before serving, replayed with new inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Which launches a step needs. `rows`: padded; `long_items`: LoRA's, where steps of so many
    rows usually have short ones."""

    rows: int
    has_prompts: bool
    with_lora: bool
    long_items: bool = False


class StepGraphs:
    """CUDA graphs by key. They share one memory pool: only one runs at a time."""

    def __init__(self) -> None:
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def capture(self, key: GraphKey, launch: Callable[[], object]) -> None:
        """Record what `launch` enqueues on the current stream. It must have run before, so that
        everything is compiled and loaded."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would also collect garbage and give cached memory back, each time
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        self._pool = graph.pool()
        self._graphs[key] = graph

    def replay(self, key: GraphKey) -> None:
        self._graphs[key].replay()
