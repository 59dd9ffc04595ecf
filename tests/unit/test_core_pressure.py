"""Too few pages: who gives, who is spared, and what it costs."""

from __future__ import annotations

import pytest

from engine_svc.core import pressure
from engine_svc.core.pressure import Claim
from engine_svc.core.waits import Cause
from tests.support.core_world import World, adapter, limits

AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


@AHEAD
def test_a_preempted_sequence_comes_back_and_nothing_is_delivered_twice(run_ahead: int) -> None:
    world = World(limits(num_pages=10, run_ahead=run_ahead, prefix_cache=False))
    for _ in range(3):
        world.submit(6, max_tokens=24)
    world.run()
    assert world.core.snapshot().preemptions > 0
    assert all(len(h.tokens[0]) == 24 for h in world.heard.values())
    reopened = [o for p in world.runner.plans for o in p.seat_openings if o.output_token_ids]
    assert reopened, "nobody came back with its output"


@AHEAD
def test_the_oldest_sequence_is_never_preempted(run_ahead: int) -> None:
    world = World(limits(num_pages=8, run_ahead=run_ahead, prefix_cache=False))
    oldest = world.submit(6, max_tokens=20)
    for _ in range(4):
        world.submit(6, max_tokens=20)
    world.run()
    openings = [o for p in world.runner.plans for o in p.seat_openings]
    mine = [o for o in openings if o.sampling.seed == oldest.request.sampling.seed]
    assert len(mine) == 1
    assert world.core.snapshot().preemptions > 0


def test_recomputed_tokens_are_not_charged_again() -> None:
    world = World(limits(num_pages=8, prefix_cache=False, quantum=10**6, turn_max_steps=10**6))
    for _ in range(2):
        world.submit(6, max_tokens=20)
    most = 0
    while world.core.num_live:
        world.step()
        most = max(most, *(turn.service for turn in world.core._books.turns), 0)
    computed = sum(c.num_tokens for plan in world.runner.plans for c in plan.chunks)
    assert computed > 2 * 25, "nothing was recomputed"
    assert most <= 2 * (6 + 2 * 19)


@AHEAD
def test_an_arena_that_holds_one_request_at_a_time_serves_them_all(run_ahead: int) -> None:
    world = World(limits(num_pages=7, max_loras=2, run_ahead=run_ahead), adapter_pages=2)
    heard = [world.submit(10, adapter(name), max_tokens=8) for name in "abcabc"]
    heard += [world.submit(12, max_tokens=10, n=2)]
    world.run()
    assert all(h.ended and h.ended.failure is None for h in heard)


def test_loads_take_paused_sequences_pages_when_the_ring_needs_them() -> None:
    world = World(limits(num_pages=13, max_loras=1, prefix_cache=False), adapter_pages=4)
    for _ in range(2):
        world.submit(10, adapter("a"), max_tokens=12)
    for _ in range(4):
        world.step()
    planned = world.submit(10, adapter("b"), max_tokens=12)
    while planned.planned_s is None:
        world.step()
    snapshot = world.core.snapshot()
    assert snapshot.preemptions == 1
    assert snapshot.adapter_pages == 8
    world.run()


@AHEAD
def test_a_load_never_takes_the_pages_of_the_oldest_sequence_while_it_is_paused(
    run_ahead: int,
) -> None:
    world = World(
        limits(num_pages=12, max_loras=1, prefix_cache=False, run_ahead=run_ahead), adapter_pages=4
    )
    oldest = world.submit(10, adapter("a"), max_tokens=20)
    for _ in range(4):
        world.step()
    late = world.submit(10, adapter("b"), max_tokens=4)
    came_back = 0
    while oldest.ended is None:
        report = world.step()
        assert world.core.snapshot().preemptions == 0
        lacks_bytes = any(cause is Cause.BYTES for cause, _ in report.deferred)
        openings = world.runner.plans[-1].seat_openings if report.step >= 0 else ()
        came_back += lacks_bytes and any(o.output_token_ids for o in openings)
    assert came_back, "the oldest was never paused while the load lacked pages"
    assert late.planned_s is None, "there was room for both"
    world.run()
    assert late.ended is not None
    assert late.ended.failure is None


def test_a_sequence_that_has_not_advanced_since_it_got_its_pages_keeps_them() -> None:
    world = World(limits(num_pages=12, prefix_cache=False))
    oldest, victim, asking = (world.submit(12, max_tokens=30) for _ in range(3))
    for _ in range(3):
        world.step()
    books = world.core._books
    held = books.requests[victim.request.request_id].sequences[0]
    first = books.requests[oldest.request.request_id].sequences[0]
    wants = books.requests[asking.request.request_id].sequences[0]
    assert held.page_ids
    lacking = books.memory.num_room + 1
    held.furthest = held.num_planned
    assert not pressure.make_room(books, lacking, wants, Claim.TURN, world.clock.now())
    assert held.page_ids
    held.furthest = 0
    assert pressure.make_room(books, lacking, wants, Claim.TURN, world.clock.now())
    assert not held.page_ids
    assert first.page_ids
    world.run()
