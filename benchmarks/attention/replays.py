"""Times device work as replays of CUDA graphs, versions in turn so that clocks drift for all alike.

On a CPU the same calls run as they are, for dry runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

WARM_UPS = 3


def measure(
    versions: Mapping[str, Callable[[], None]], replays: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each replay of each version."""
    if device.type == "cpu":
        return {name: [_host_s(run) for _ in range(replays)] for name, run in versions.items()}
    graphs = {name: _capture(run) for name, run in versions.items()}
    seconds: dict[str, list[float]] = {name: [] for name in versions}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(WARM_UPS + replays):
        for name, graph in graphs.items():
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= WARM_UPS:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    return seconds


def _capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _host_s(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
