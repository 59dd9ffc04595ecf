"""Places rotate: whoever asks is planned within a bound, whatever the others do."""

from __future__ import annotations

import random

import pytest

from engine_svc.core.limits import longest_turn
from tests.support.core_invariants import WaitWatch
from tests.support.core_world import Heard, World, adapter, limits

AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


@AHEAD
@pytest.mark.parametrize("max_loras", [1, 2, 3])
@pytest.mark.parametrize("num_adapters", [2, 5, 8])
def test_every_adapter_is_planned_within_its_bound_under_adversarial_arrivals(
    run_ahead: int, max_loras: int, num_adapters: int
) -> None:
    engine_limits = limits(
        max_loras=max_loras, num_slots=max_loras + 1, num_pages=200, run_ahead=run_ahead,
        max_num_seqs=6, max_num_batched_tokens=24, quantum=24,
    )  # fmt: skip
    world = World(engine_limits)
    chance = random.Random(num_adapters * 10 + max_loras)
    watch = world.watch = WaitWatch()
    rare: Heard | None = None
    for _ in range(600):
        # all but one adapter flood; the last one asks now and then
        for index in range(num_adapters - 1):
            name = f"flood{index}"
            if sum(h.ended is None for h in world.heard.values()) < 60:
                world.submit(chance.randint(1, 12), adapter(name), max_tokens=40)
        if (rare is None or rare.ended is not None) and chance.random() < 0.1:
            rare = world.submit(4, adapter("rare"), max_tokens=2)
        world.step()
    assert watch.num_stays >= num_adapters
    assert watch.closest > 0
    assert sum(h.ended is not None for h in world.heard.values()) > 10


@AHEAD
def test_the_base_is_planned_within_its_bound_while_adapters_hold_all_seats(
    run_ahead: int,
) -> None:
    engine_limits = limits(num_pages=300, max_num_seqs=3, run_ahead=run_ahead)
    world = World(engine_limits)
    for _ in range(20):
        world.submit(4, adapter("a"), max_tokens=50)
        world.submit(4, adapter("b"), max_tokens=50)
    for _ in range(5):
        world.step()
    heard = world.submit(4)
    for _ in range(2 * longest_turn(engine_limits)):
        world.step()
    assert heard.planned_s is not None
    world.run()


def test_a_turn_that_nobody_waits_for_goes_on_past_its_quantum() -> None:
    world = World(limits(quantum=16, turn_max_steps=1, closing_steps=0))
    heard = world.submit(4, adapter("a"), max_tokens=50)
    world.run()
    assert heard.ended is not None
    assert heard.ended.stats.paused_s == 0


def test_a_closing_turn_takes_nobody_new_and_what_runs_may_end() -> None:
    world = World(limits(max_loras=1, quantum=28, closing_steps=30, turn_max_steps=100))
    first = world.submit(4, adapter("a"), max_tokens=25)
    for _ in range(12):
        world.step()
    other = world.submit(4, adapter("b"), max_tokens=2)
    for _ in range(3):
        world.step()
    late = world.submit(4, adapter("a"), max_tokens=2)
    world.run()
    assert first.ended is not None
    assert first.ended.stats.paused_s == 0
    assert other.planned_s is not None
    assert late.planned_s is not None
    assert other.planned_s < late.planned_s


def test_a_paused_sequence_keeps_its_pages_and_computes_nothing_twice() -> None:
    world = World(limits(max_loras=1, quantum=16, closing_steps=0))
    for name in "ab":
        world.submit(6, adapter(name), max_tokens=30)
    world.run()
    computed = sum(c.num_tokens for plan in world.runner.plans for c in plan.chunks)
    assert computed == 2 * (6 + 30 - 1)
    assert all(h.ended and h.ended.stats.paused_s > 0 for h in world.heard.values())


def _steps_until_b(num_pages: int, idle: int = 0) -> int:
    """How long a newcomer waits for the only place; `idle`: adapters that nobody asks for any
    more."""
    world = World(
        limits(max_loras=1, max_num_seqs=2, num_pages=num_pages, num_slots=8, quantum=10**6,
               turn_steps=5, turn_max_steps=40, closing_steps=0)
    )  # fmt: skip
    for index in range(idle):
        world.submit(1, adapter(f"idle{index}"), max_tokens=1)
        world.run()
    # two sequences of 10 to 16 pages
    for _ in range(2):
        world.submit(40, adapter("a"), max_tokens=24)
    for _ in range(10):
        world.step()
    other = world.submit(4, adapter("b"), max_tokens=2)
    steps = 0
    while other.planned_s is None:
        world.step()
        steps += 1
    world.run()
    assert all(heard.ended for heard in world.heard.values())
    return steps


def test_turns_are_short_while_pages_are_to_spare_and_long_while_they_are_not() -> None:
    assert _steps_until_b(200) <= 5
    assert _steps_until_b(28) >= 8


def test_pages_of_adapters_that_nobody_waits_for_are_to_spare() -> None:
    assert _steps_until_b(38, idle=6) <= 5


def test_weight_stretches_a_turn() -> None:
    served: dict[float, int] = {}
    for weight in (1.0, 3.0):
        world = World(limits(max_loras=1, quantum=16, closing_steps=0, turn_max_steps=100))
        heavy = world.submit(4, adapter("heavy", weight), max_tokens=50)
        world.submit(4, adapter("b"), max_tokens=50)
        for _ in range(40):
            world.step()
        served[weight] = len(heavy.tokens[0])
        world.run()
    assert served[3.0] > served[1.0]
