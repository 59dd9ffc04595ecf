"""What the GPU's runner spends on reading a plan before it can launch: the host's part alone.

    python -m benchmarks.plan_reading [--steps 200] [--rounds 5]

The plans are those of benchmarks/plan_cost.py: 256 running sequences, 64 places. Each is read as
model/gpu/stepper.py reads it, padded as a step with prompts is, into CPU tensors; nothing is copied
or launched. Time is the thread's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import deque
from itertools import pairwise

import numpy as np
import torch

from benchmarks.plan_cost import NUM_SEQS, NobodyRunner, samples
from engine_svc.floor import FloorMeter, StepFloor
from engine_svc.model.gpu.page_table import PageTable
from engine_svc.model.gpu.step_inputs import StepInputs
from engine_svc.model.gpu.step_rows import fill_rows
from engine_svc.model.gpu.step_shapes import StepLimits
from engine_svc.step_chunks import Chunks
from engine_svc.types import (
    LateInputs,
    SlotBinding,
    StepPlan,
)

MAX_ROWS, TILE_ROWS, MAX_PAGES = 1024, 16, 128
NUM_FLOWS, MAX_LORAS = 10_000, 64
NUM_SLOTS = 4 * MAX_LORAS
PARTS = ("rows", "pages", "floor")


class Keeper(NobodyRunner):
    """Remembers the last plans."""

    def __init__(self, num_plans: int) -> None:
        super().__init__()
        self.plans: deque[StepPlan] = deque(maxlen=num_plans)

    def forward(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().forward(plan)


class SilentRunner(NobodyRunner):
    """Does nothing, so that only its meter costs something."""

    def forward(self, plan: StepPlan) -> None:
        pass


class Reader:
    """The parts of reading a plan, one after the other."""

    def __init__(self) -> None:
        device = torch.device("cpu")
        limits = StepLimits(MAX_ROWS, NUM_SEQS, NUM_SLOTS, 1, TILE_ROWS)
        self._inputs = StepInputs(limits.mixed_sizes(), 3, device)
        self._table = PageTable(NUM_SEQS, MAX_PAGES, device)
        self._rank_blocks = np.ones(NUM_SLOTS, dtype=np.int64)
        self._meter = FloorMeter(SilentRunner(), StepFloor(1.0, 1.0, 1, 1, 1, 1))
        bindings = tuple(SlotBinding(slot, "", (0,)) for slot in range(NUM_SLOTS))
        self._meter.sample(StepPlan(0, Chunks.of(()), slot_bindings=bindings), LateInputs())

    def read(self, plan: StepPlan) -> tuple[float, ...]:
        """µs of each of PARTS."""
        staged, at = self._inputs.acquire(), [time.thread_time()]
        fill_rows(plan.chunks, staged, MAX_ROWS, TILE_ROWS, TILE_ROWS, self._rank_blocks)
        at.append(time.thread_time())
        self._table.updates(plan.chunks)
        at.append(time.thread_time())
        self._meter.sample(plan, LateInputs())
        at.append(time.thread_time())
        return tuple((after - before) * 1e6 for before, after in pairwise(at))


def measure(num_steps: int, num_rounds: int) -> dict[str, object]:
    keeper, reader = Keeper(num_steps), Reader()
    samples(NUM_FLOWS, MAX_LORAS, num_steps, keeper)
    gc.collect()
    gc.freeze()
    rounds = [[reader.read(plan) for plan in keeper.plans] for _ in range(num_rounds + 1)]
    parts = list(zip(*[parts for one in rounds[1:] for parts in one], strict=True))
    medians = {
        f"{name}_us": round(statistics.median(us), 1) for name, us in zip(PARTS, parts, strict=True)
    }
    whole = [sum(us) for us in zip(*parts, strict=True)]
    return {
        "benchmark": "plan_reading", "sequences": NUM_SEQS, "plans": len(keeper.plans),
        "read_us_median": round(statistics.median(whole), 1), **medians,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(args.steps, args.rounds)))


if __name__ == "__main__":
    main()
