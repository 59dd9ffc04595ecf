"""The least time of a step, told once for every step that was launched."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from engine_svc.floor import FloorMeter, StepFloor
from engine_svc.model.device_rates import runtime_bytes
from engine_svc.observing import StepMetrics
from engine_svc.snapshots import CoreSnapshot
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
    LateInputs,
    SlotBinding,
    StepPlan,
    StepResult,
)

FLOOR = StepFloor(
    bytes_per_s=1000.0, flops_per_s=50.0, weights_bytes=400, kv_token_bytes=2, page_bytes=100,
    flops_a_token=10,
)  # fmt: skip


class FakeRunner:
    """Says what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(self, plan: StepPlan) -> None:
        self.calls.append(f"forward {plan.step}")

    def sample(self, plan: StepPlan, late: LateInputs) -> None:
        self.calls.append(f"sample {plan.step}")

    def collect(self, step: int) -> StepResult:
        self.calls.append(f"collect {step}")
        return StepResult(step, ())


def decode(seat: int, slot: int, start: int) -> Chunk:
    return Chunk(seat, slot, start, 1, (), (0,), (seat,))


def test_floor_is_the_longer_of_bytes_and_products() -> None:
    assert FLOOR.seconds(1, 20, 3) == pytest.approx((400 + 40 + 300) / 1000)
    assert FLOOR.seconds(10, 20, 3) == pytest.approx(10 * 10 / 50)


def test_each_adapter_of_a_step_counts_once_and_the_base_not_at_all() -> None:
    told: list[float] = []
    runner = FakeRunner()
    meter = FloorMeter(runner, FLOOR, told.append)
    bindings = (SlotBinding(4, "a", (1, 2, 3)), SlotBinding(5, "b", (6,)))
    chunks = Chunks.of((decode(0, 4, 9), decode(1, 4, 19), decode(2, NO_SLOT, 29)))
    meter.forward(StepPlan(1, chunks, slot_bindings=bindings))
    meter.sample(StepPlan(1, chunks, slot_bindings=bindings), LateInputs())
    assert told == [pytest.approx(max((400 + 2 * 60 + 300) / 1000, 3 * 10 / 50))]
    meter.sample(StepPlan(2, Chunks.of((decode(0, 4, 9), decode(1, 5, 9)))), LateInputs())
    assert told[1:] == [pytest.approx((400 + 2 * 20 + 400) / 1000)]
    meter.sample(StepPlan(3, Chunks.of(())), LateInputs())
    assert len(told) == 2
    assert meter.collect(1).step == 1
    assert runner.calls == ["forward 1", "sample 1", "sample 2", "sample 3", "collect 1"]


def test_positions_before_a_sliding_window_are_not_read() -> None:
    told: list[float] = []
    meter = FloorMeter(FakeRunner(), replace(FLOOR, window=8, flops_per_s=1e6), told.append)
    long = Chunk(1, NO_SLOT, 100, 5, (1,) * 5, (0,))
    chunks = Chunks.of((decode(0, NO_SLOT, 9), decode(2, NO_SLOT, 3), long))
    # positions count from the origin, as in the core's plans
    later = replace(chunks, origin=2, offsets=array("q", [s - 2 for s in chunks.offsets]))
    for plan in (StepPlan(1, chunks), StepPlan(2, later)):
        meter.sample(plan, LateInputs())
    # 7 + 1 of the first, 3 + 1 of the second, 7 + 5 of the third
    assert told == 2 * [pytest.approx((400 + 2 * 24) / 1000)]


def test_floor_becomes_a_metric() -> None:
    registry = CollectorRegistry()
    StepMetrics(10, CoreSnapshot, registry).floor(0.25)
    assert registry.get_sample_value("loraplex_step_floor_seconds_sum") == 0.25


def test_a_cpu_holds_nothing_beside_what_is_counted() -> None:
    assert runtime_bytes("cpu", 0) == 0
