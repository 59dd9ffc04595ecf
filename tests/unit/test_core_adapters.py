"""Adapters on their way into slots: order, failures, eviction, the cache's borders."""

from __future__ import annotations

import pytest

from tests.support.core_world import Heard, World, adapter, limits

AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


def failure_reason(heard: Heard) -> str | None:
    assert heard.ended is not None
    return None if heard.ended.failure is None else heard.ended.failure.reason


def test_adapters_are_wanted_in_the_order_of_their_demand() -> None:
    world = World(limits(max_wanted=3))
    world.weights.delay = lambda: 2
    for name in "abcd":
        world.submit(4, adapter(name))
    world.step()
    assert world.weights.wants == [("sha256:a", 0), ("sha256:b", 1), ("sha256:c", 2)]
    world.run()
    assert len(world.weights.dropped) == 4


def test_weights_are_dropped_from_the_host_once_they_are_in_a_slot() -> None:
    world = World(limits())
    world.writer.delay = lambda: 3
    world.submit(4, adapter("a"))
    world.step()
    world.step()
    assert world.weights.held == {"sha256:a"}
    for _ in range(4):
        world.step()
    assert world.weights.held == set()
    world.run()


def test_an_adapter_in_a_slot_is_not_loaded_again() -> None:
    world = World(limits())
    for _ in range(3):
        world.submit(4, adapter("a"))
        world.run()
    assert len(world.weights.wants) == 1


def test_the_least_recently_used_idle_slot_makes_room() -> None:
    world = World(limits(num_slots=2, max_loras=2))
    for name in "abac":
        world.submit(4, adapter(name))
        world.run()
    resident = {row.adapter.name for row in world.core.snapshot().residents}
    assert resident == {"a", "c"}
    assert world.core.snapshot().slot_evictions == 1


@AHEAD
def test_a_load_that_fails_ends_only_its_own_requests_and_is_tried_again(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead))
    world.weights.failing = {"sha256:a"}
    failed = [world.submit(4, adapter("a")) for _ in range(2)]
    served = [world.submit(4, adapter("b")), world.submit(4)]
    world.run()
    assert [failure_reason(h) for h in failed] == ["DIGEST_MISMATCH"] * 2
    assert [failure_reason(h) for h in served] == [None, None]
    world.weights.failing = set()
    again = world.submit(4, adapter("a"))
    world.run()
    assert failure_reason(again) is None


def test_a_copy_that_fails_gives_slot_and_pages_back() -> None:
    world = World(limits())
    world.writer.failing = {"sha256:a"}
    failed = world.submit(4, adapter("a"))
    world.run()
    assert failure_reason(failed) == "INVARIANT"
    assert world.core.snapshot().adapter_pages == 0
    world.writer.failing = set()
    again = world.submit(4, adapter("a"))
    world.run()
    assert failure_reason(again) is None


def test_an_adapter_larger_than_the_arena_is_refused_by_name() -> None:
    world = World(limits(num_pages=8), adapter_pages=8)
    heard = world.submit(4, adapter("big"))
    world.run()
    assert failure_reason(heard) == "ADAPTER_TOO_LARGE"
    assert heard.ended is not None
    assert heard.ended.failure is not None
    assert dict(heard.ended.failure.metadata) == {"adapter": "big", "pages": "8", "limit": "7"}


def test_a_prompt_that_does_not_fit_beside_its_adapter_is_refused() -> None:
    world = World(limits(num_pages=8), adapter_pages=6)
    long, short = world.submit(9, adapter("a")), world.submit(8, adapter("a"), max_tokens=1)
    world.run()
    assert failure_reason(long) == "PROMPT_TOO_LONG"
    assert failure_reason(short) is None
    # now the size is known at admission
    late = world.submit(9, adapter("a"))
    assert failure_reason(late) == "PROMPT_TOO_LONG"
    assert not late.admitted


def test_a_slow_load_holds_up_nobody_else() -> None:
    world = World(limits(max_loras=1))
    world.weights.delay = lambda: 1000
    slow = world.submit(4, adapter("slow"))
    world.step()
    world.weights.delay = lambda: 0
    quick, base = world.submit(4, adapter("quick"), max_tokens=8), world.submit(4, max_tokens=8)
    for _ in range(20):
        world.step()
    assert failure_reason(quick) is None
    assert failure_reason(base) is None
    assert slow.ended is None
    world.run()


@AHEAD
def test_a_prompt_seen_before_is_found_in_the_prefix_index(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead))
    prompt = tuple(range(13))
    first = world.submit(prompt, adapter("a"))
    world.run()
    second = world.submit((*prompt[:12], 30, 31), adapter("a"))
    world.run()
    assert first.ended is not None
    assert second.ended is not None
    assert first.ended.stats.cached_tokens == 0
    assert second.ended.stats.cached_tokens == 12


@pytest.mark.parametrize(
    "other",
    [
        {"ref": adapter("b")},
        {"ref": None},
        {"tenant": "another"},
        {"salt": "another"},
        {"prompt_logprobs": 1},
    ],
    ids=lambda other: next(iter(other)),
)
def test_nothing_is_found_across_adapters_tenants_salts_or_for_prompt_logprobs(
    other: dict[str, object],
) -> None:
    world = World(limits())
    prompt = tuple(range(13))
    world.submit(prompt, adapter("a"))
    world.run()
    changed = {"ref": adapter("a"), **other}
    heard = world.submit(prompt, **changed)  # type: ignore[arg-type]
    world.run()
    assert heard.ended is not None
    assert heard.ended.stats.cached_tokens == 0


def test_cached_pages_give_way_to_requests_and_to_adapters() -> None:
    world = World(limits(num_pages=10), adapter_pages=4)
    for number in range(6):
        heard = world.submit(tuple(range(number, number + 17)), adapter("ab"[number % 2]))
        world.run()
        assert failure_reason(heard) is None
