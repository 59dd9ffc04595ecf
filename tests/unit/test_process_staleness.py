"""An engine that is cut off from its registry serves adapters for so long and no longer."""

from __future__ import annotations

import time

import grpc
import pytest

from engine_svc.names import NameMap
from engine_svc.processes.staleness import Staleness
from loraplex.status import Unavailable
from tests.support.waiting import eventually


def test_names_become_stale_at_the_limit_and_fresh_when_the_registry_is_back() -> None:
    told: list[bool] = []
    staleness = Staleness(0.05, told.append)
    staleness.lost(time.monotonic())
    staleness.lost(time.monotonic())
    eventually(lambda: told == [True])
    staleness.back()
    staleness.back()
    assert told == [True, False]
    staleness.lost(time.monotonic())
    eventually(lambda: told == [True, False, True])


def test_time_before_the_loss_was_noticed_counts() -> None:
    told: list[bool] = []
    Staleness(1000.0, told.append).lost(time.monotonic() - 1001.0)
    eventually(lambda: told == [True])


def test_a_registry_that_is_back_in_time_is_not_missed() -> None:
    told: list[bool] = []
    staleness = Staleness(0.05, told.append)
    staleness.lost(float("-inf"))
    staleness.back()
    Staleness(0.0, told.append).lost(float("-inf"))
    time.sleep(0.1)
    assert told == []


def test_stale_names_resolve_to_unavailable() -> None:
    names = NameMap()
    names.is_stale = True
    with pytest.raises(Unavailable) as raised:
        names.resolve("sql", "default")
    error = raised.value
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "REGISTRY_UNREACHABLE")
    assert "--max-registry-staleness" in error.message
