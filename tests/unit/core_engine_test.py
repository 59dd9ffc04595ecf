"""The core serves requests: tokens, ends, adapters, failures; with and without run-ahead."""

from __future__ import annotations

import pytest

from engine_svc.types import FinishReason
from tests.support.core_world import World, adapter, limits

AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


@AHEAD
def test_a_request_to_the_base_gets_its_tokens(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead))
    heard = world.submit(10, max_tokens=5)
    world.run()
    assert len(heard.tokens[0]) == 5
    assert heard.reasons == {0: FinishReason.LENGTH}
    assert world.weights.wants == []


@AHEAD
def test_three_adapters_and_the_base_rotate_through_two_places(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead))
    for ref in (adapter("a"), adapter("b"), adapter("c"), None):
        for _ in range(3):
            world.submit(6, ref, max_tokens=20)
    world.run()
    assert all(h.ended and h.ended.failure is None for h in world.heard.values())
    assert max(plan.num_adapters for plan in world.runner.plans) == 2
    assert sum(h.ended.stats.paused_s for h in world.heard.values() if h.ended) > 0
