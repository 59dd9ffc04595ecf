"""What the allocator asks of the driver while serving is counted and told, each time once."""

from __future__ import annotations

import pytest
import torch

from engine_svc.model.gpu import allocation_guard
from engine_svc.model.gpu.allocation_guard import AllocationGuard


def test_allocations_since_serving_began_are_logged_when_new_ones_are_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 7
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_device_alloc": asked})
    monkeypatch.setattr(allocation_guard, "_EVERY_STEPS", 3)
    guard = AllocationGuard(torch.device("cuda"))

    def logged_in(steps: int) -> int:
        caplog.clear()
        for _ in range(steps):
            guard.stepped()
        return len(caplog.records)

    assert logged_in(6) == 0, "the warm-up allocates"
    asked = 9
    guard.arm()
    assert logged_in(6) == 0
    asked = 11
    assert logged_in(2) == 0, "looks are rare"
    assert logged_in(1) == 1
    assert caplog.records[0].message == "memory.allocated_while_serving"
    assert caplog.records[0].__dict__["allocations"] == guard.num_allocations == 2
    assert logged_in(6) == 0
    asked = 12
    assert logged_in(3) == 1


def test_a_cpu_has_nothing_to_guard(caplog: pytest.LogCaptureFixture) -> None:
    guard = AllocationGuard(torch.device("cpu"))
    guard.arm()
    for _ in range(2000):
        guard.stepped()
    assert guard.num_allocations == 0
    assert not caplog.records
