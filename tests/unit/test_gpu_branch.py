"""The orders in which a site's launches are made."""

from __future__ import annotations

import pytest
import torch

from engine_svc.model.gpu.branch import Branch
from kernels.lora_tables import TILE_ROWS
from kernels.lora_tuning import ORDERS, SiteTuning, delta_tuning, shrink_tuning

CALLS = {
    "branch": ["shrink", "expand", "gemm"],
    "GEMM": ["gemm", "shrink", "expand"],
    "shrink": ["shrink", "expand", "gemm"],
    "after": ["gemm", "shrink", "expand"],
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_makes_each_launch_once(order: str) -> None:
    calls: list[str] = []
    tuning = SiteTuning(shrink_tuning(64, TILE_ROWS), delta_tuning(64, TILE_ROWS), order)
    Branch(torch.device("cpu")).run(
        tuning,
        lambda: calls.append("shrink"),
        lambda: calls.append("expand"),
        lambda: calls.append("gemm"),
    )
    assert calls == CALLS[order]
