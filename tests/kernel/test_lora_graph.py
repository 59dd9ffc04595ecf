"""A captured CUDA graph of the kernels serves later steps whose plan was written in place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.lora_add import lora_add
from kernels.lora_add_triton import lora_add_triton
from kernels.lora_delta import lora_delta
from kernels.lora_delta_triton import lora_delta_triton
from kernels.lora_shrink import lora_shrink
from kernels.lora_shrink_triton import lora_shrink_triton
from kernels.lora_tables import RANK_BLOCK, LoraDelta, SegmentPlan, plan_segments
from tests.kernel.lora_case import CELL, FIRST_ENTRY, LoraCase, lora_case, rows_by_slot

pytestmark = pytest.mark.gpu
RANKS = ((8, 8, 8), (16, 0, 3), (0, 0, 0), (1, 24, 5), (64, 4, 20))
SPANS = ((0, 512), (512, 128), (640, 128))


def test_captured_kernels_follow_a_plan_that_changes_in_place() -> None:
    first = rows_by_slot("distinct", 40, len(RANKS), num_base_rows=8, seed=0)
    case = lora_case(first, RANKS, 512, SPANS, torch.bfloat16, device="cuda")
    y, delta, u = case.y.clone(), torch.empty_like(case.y), case.empty_u()
    stored = LoraDelta(delta, case.row_slot, case.table, CELL)
    num_slices = case.columns.num_slices

    def step() -> None:
        lora_shrink_triton(case.x, case.table, case.plan, FIRST_ENTRY, num_slices, u)
        lora_delta_triton(u, case.table, case.plan, FIRST_ENTRY, case.columns, CELL, delta)
        lora_add_triton(y, stored)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    capacity = case.plan.tiles.shape[0]
    rank_blocks = [-(-max(ranks) // RANK_BLOCK) for ranks in RANKS]
    for popularity in ("identical", "zipf", "skewed"):
        segments = rows_by_slot(popularity, 30, len(RANKS), num_base_rows=18, seed=1)
        plan = plan_segments(segments, capacity, rank_blocks, case.x.device)
        for name in ("tiles", "num_tiles", "shrink_tiles", "num_shrink_tiles"):
            getattr(case.plan, name).copy_(getattr(plan, name))
        stored.row_slot.copy_(replace(case, plan=plan).row_slot)
        y.copy_(case.y)
        delta.fill_(torch.nan)
        graph.replay()
        check(case, plan, y)


def check(case: LoraCase, plan: SegmentPlan, y: torch.Tensor) -> None:
    now = replace(case, plan=plan)
    u = lora_shrink(case.x, case.table, plan, FIRST_ENTRY, case.columns.num_slices, case.empty_u())
    delta = lora_delta(u, case.table, plan, FIRST_ENTRY, case.columns, CELL, torch.empty_like(y))
    expected = lora_add(case.y.clone(), LoraDelta(delta, now.row_slot, case.table, CELL))
    # one rounding of the low-rank inputs, of the delta and of the sum
    torch.testing.assert_close(y, expected, rtol=2**-6, atol=2**-5)
