"""The orders in which a site's launches are made."""

from __future__ import annotations

import pytest
import torch

from engine_svc.model.gpu.branch import Branch
from engine_svc.model.gpu.cuda import MAIN_PRIORITY, new_stream
from kernels.lora_site_tuning import LATER, ORDERS, SAME, SOONER, SiteTuning
from kernels.lora_tables import TILE_ROWS
from kernels.lora_tuning import delta_tuning, shrink_tuning

CALLS = {
    "branch": ["shrink", "expand", "gemm"],
    "GEMM": ["gemm", "shrink", "expand"],
    "after": ["gemm", "shrink", "expand"],
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_makes_each_launch_once(order: str) -> None:
    calls: list[str] = []
    tuning = SiteTuning(shrink_tuning(64, TILE_ROWS), delta_tuning(64, TILE_ROWS, 1), order)
    Branch(torch.device("cpu")).run(
        tuning,
        lambda: calls.append("shrink"),
        lambda: calls.append("expand"),
        lambda: calls.append("gemm"),
    )
    assert calls == CALLS[order]


@pytest.mark.gpu
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("priority", [SOONER, SAME, LATER])
def test_every_order_and_priority_is_captured_with_all_its_dependencies(
    order: str, priority: int
) -> None:
    device = torch.device("cuda")
    x, weight = (torch.randn(512, 512, device=device) for _ in range(2))
    u, delta, y, out = (torch.empty_like(x) for _ in range(4))
    shrink, expand = shrink_tuning(64, TILE_ROWS), delta_tuning(64, TILE_ROWS, 1)
    tuning = SiteTuning(shrink, expand, order, priority, processors=112)
    branch = Branch(device)

    def work() -> None:
        for _ in range(8):  # each reads what the one before wrote
            branch.run(
                tuning,
                lambda: torch.add(x, 1, out=u),
                lambda: torch.mul(u, 2, out=delta),
                lambda: torch.mm(x, weight, out=y),
            )
            torch.add(y, delta, out=out)
            torch.div(out, out.norm(), out=x)

    first, stream = x.clone(), new_stream(device, MAIN_PRIORITY)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        work()
        graph.capture_end()
        x.copy_(first)
        for tensor in (u, delta, y, out):
            tensor.fill_(torch.nan)
        graph.replay()
    torch.cuda.synchronize()
    expected = first
    for _ in range(8):
        total = expected @ weight + (expected + 1) * 2
        expected = total / total.norm()
    torch.testing.assert_close(x, expected, rtol=1e-3, atol=1e-5)
