"""A captured CUDA graph of both kernels serves later steps whose plan was written in place."""

from __future__ import annotations

import pytest
import torch

from kernels.lora_expand import lora_expand
from kernels.lora_expand_triton import lora_expand_triton
from kernels.lora_shrink import lora_shrink
from kernels.lora_shrink_triton import lora_shrink_triton
from kernels.lora_tables import SegmentPlan, plan_segments
from tests.kernel.lora_case import CELL, FIRST_ENTRY, LoraCase, lora_case, rows_by_slot
from tests.kernel.lora_checks import ROUNDING

pytestmark = pytest.mark.gpu
RANKS = ((8, 8, 8), (16, 0, 3), (0, 0, 0), (1, 24, 5), (64, 4, 20))
SPANS = ((0, 512), (512, 128), (640, 128))


def test_captured_kernels_follow_a_plan_that_changes_in_place() -> None:
    first = rows_by_slot("distinct", 40, len(RANKS), num_base_rows=8, seed=0)
    case = lora_case(first, RANKS, 512, SPANS, torch.bfloat16, device="cuda")
    y, u = case.y.clone(), case.empty_u()
    num_slices = case.columns.num_slices

    def step() -> None:
        lora_shrink_triton(case.x, case.table, case.plan, FIRST_ENTRY, num_slices, u)
        lora_expand_triton(u, case.table, case.plan, FIRST_ENTRY, case.columns, CELL, y)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    capacity = case.plan.tiles.shape[0]
    for popularity in ("identical", "zipf", "skewed"):
        segments = rows_by_slot(popularity, 30, len(RANKS), num_base_rows=18, seed=1)
        plan = plan_segments(segments, capacity, case.x.device)
        case.plan.tiles.copy_(plan.tiles)
        case.plan.num_tiles.copy_(plan.num_tiles)
        y.copy_(case.y)
        graph.replay()
        check(case, plan, y)


def check(case: LoraCase, plan: SegmentPlan, y: torch.Tensor) -> None:
    expected_u = lora_shrink(
        case.x, case.table, plan, FIRST_ENTRY, case.columns.num_slices, case.empty_u()
    )
    expected = case.y.clone()
    lora_expand(expected_u, case.table, plan, FIRST_ENTRY, case.columns, CELL, expected)
    torch.testing.assert_close(y, expected, **ROUNDING[y.dtype])
