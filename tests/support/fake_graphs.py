"""CUDA graphs on a CPU: the launches themselves, called again with the views that the capture saw.

So whatever a launch took from the step that was captured shows. The kernels' references learn their
segments from the work list on the device then, as the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_svc.model.gpu import site_deltas, stepper
from engine_svc.model.gpu.graphs import GraphKey
from engine_svc.model.gpu.warm_up import WarmUp
from kernels.lora_tables import SegmentPlan
from tests.support.direct_runner import DirectRunner


class FakeGraphs:
    """StepGraphs of launches that run again when they are replayed."""

    def __init__(self) -> None:
        self.launches: dict[GraphKey, Callable[[], object]] = {}
        self.replayed: list[GraphKey] = []

    def __len__(self) -> int:
        return len(self.launches)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.launches

    def capture(self, key: GraphKey, launch: Callable[[], object]) -> None:
        self.launches[key] = launch

    def replay(self, key: GraphKey) -> None:
        self.replayed.append(key)
        self.launches[key]()


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are loaded from here on capture into FakeGraphs."""
    monkeypatch.setattr(stepper, "StepGraphs", FakeGraphs)
    for name in ("lora_shrink", "lora_delta"):
        monkeypatch.setattr(site_deltas, name, _by_work_list(getattr(site_deltas, name)))


def _by_work_list(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def wrapped(left: torch.Tensor, table: Any, plan: SegmentPlan, *others: Any) -> torch.Tensor:
        work = plan.tiles[: int(plan.num_tiles)].tolist()
        assert all(rows <= plan.tile_rows for _, _, rows in work)
        segments = tuple((first, rows, slot) for slot, first, rows in work)
        return op(left, table, replace(plan, segments=segments), *others)

    return wrapped


def warm_up(run: DirectRunner) -> None:
    """As build_gpu_runner does it on a GPU: everything once, and captured."""
    inner: Any = run.runner
    inner._arena.page(0).zero_()
    limits, loaded = inner._stepper._limits, run.loaded
    WarmUp(
        inner, inner._stepper, loaded.layout,
        page_size=loaded.page_size,
        longest=min(loaded.context_tokens, loaded.num_pages * loaded.page_size),
        max_num_seqs=limits.max_num_seqs, max_rows=limits.max_rows,
        vocab_size=loaded.base.vocab_size, rank_blocks=limits.rank_blocks,
    ).run(capture=True)  # fmt: skip
