"""Each second before the first chunk has one cause. (The world checks the sum in every test.)"""

from __future__ import annotations

import pytest

from engine_svc.core.waits import Cause, WaitClock, waits_between
from engine_svc.types import RequestStats
from tests.support.core_world import Heard, World, adapter, limits


def stats(heard: Heard) -> RequestStats:
    assert heard.ended is not None
    return heard.ended.stats


def test_a_clock_gives_each_second_to_the_cause_that_was_current() -> None:
    clock = WaitClock(Cause.LOAD, 10.0)
    start = clock.read(11.0)
    clock.turn(Cause.PLACE, 13.0)
    clock.turn(Cause.PAGES, 14.5)
    clock.turn(Cause.SEAT, 15.0)
    waits = waits_between(start, clock.read(19.0), 0.25)
    assert (waits.load_s, waits.place_s, waits.kv_s, waits.budget_s) == (2.0, 1.5, 0.5, 4.25)


def test_time_before_the_core_heard_of_a_request_counts_as_budget() -> None:
    world = World(limits())
    heard = world.submit(4, age_s=0.5)
    world.run()
    assert stats(heard).waits.budget_s == pytest.approx(0.5)


def test_a_slow_load_is_waited_for_as_load_and_told_as_load_time() -> None:
    world = World(limits())
    world.weights.delay = lambda: 10
    world.writer.delay = lambda: 5
    heard = world.submit(4, adapter("a"))
    world.run()
    assert stats(heard).waits.load_s > 0.13
    assert stats(heard).waits.load_s == pytest.approx(stats(heard).waits.queue_s)
    assert stats(heard).load_s == pytest.approx(stats(heard).waits.load_s, abs=0.011)


def test_an_adapter_without_a_place_waits_for_a_place() -> None:
    world = World(limits(max_loras=1, quantum=1000, turn_max_steps=30))
    world.submit(4, adapter("a"), max_tokens=59)
    for _ in range(3):
        world.step()
    heard = world.submit(4, adapter("b"))
    world.run()
    waits = stats(heard).waits
    assert waits.place_s > 0.8 * waits.queue_s > 0.1


def test_a_request_without_a_seat_waits_for_budget() -> None:
    world = World(limits(max_num_seqs=1))
    world.submit(4, max_tokens=20)
    world.step()
    heard = world.submit(4)
    world.run()
    assert stats(heard).waits.budget_s == pytest.approx(stats(heard).waits.queue_s)
    assert stats(heard).waits.queue_s > 0.1


def test_a_request_without_pages_waits_for_kv() -> None:
    world = World(limits(num_pages=10))
    world.submit(20, max_tokens=16)
    world.step()
    world.step()
    heard = world.submit(24, max_tokens=2)
    world.run()
    assert stats(heard).waits.kv_s == pytest.approx(stats(heard).waits.queue_s, rel=0.2)
    assert stats(heard).waits.kv_s > 0.05


def test_a_base_request_has_no_load_time() -> None:
    world = World(limits())
    heard = world.submit(4)
    world.run()
    assert stats(heard).load_s == 0
