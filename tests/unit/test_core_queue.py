"""Queues with quotas, and waits that are refused before they begin."""

from __future__ import annotations

import math

import pytest

from engine_svc.types import Failure, TenantQuota
from tests.support.core_world import Heard, World, adapter, limits


def failure_of(heard: Heard) -> Failure:
    assert heard.ended is not None, "it was not refused"
    assert heard.ended.failure is not None
    assert not heard.admitted
    return heard.ended.failure


def test_a_queue_full_of_prompt_tokens_refuses_more() -> None:
    world = World(limits(max_queued_tokens=20))
    world.submit(12)
    failure = failure_of(world.submit(9))
    assert (failure.code, failure.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
    assert dict(failure.metadata) == {"queued_tokens": "12", "tokens": "9", "limit": "20"}
    assert world.submit(8).admitted
    world.run()


def test_a_prompt_longer_than_the_queue_is_taken_when_nobody_waits() -> None:
    world = World(limits(max_queued_tokens=5))
    heard = world.submit(12)
    world.run()
    assert heard.ended is not None
    assert heard.ended.failure is None


@pytest.mark.parametrize(
    ("quota", "field", "numbers"),
    [
        (TenantQuota(2, 1000), "max_queued_requests", ("2", "1", "2")),
        (TenantQuota(100, 25), "max_queued_tokens", ("20", "10", "25")),
    ],
)
def test_a_tenants_quota_refuses_its_own_requests_only(
    quota: TenantQuota, field: str, numbers: tuple[str, str, str]
) -> None:
    world = World(limits(max_loras=1))
    world.core.set_quotas({"small": quota})
    for name in "ab":
        assert world.submit(10, adapter(name), tenant="small").admitted
    failure = failure_of(world.submit(10, adapter("c"), tenant="small"))
    assert (failure.code, failure.reason) == ("RESOURCE_EXHAUSTED", "TENANT_QUOTA")
    queued, value, limit = numbers
    assert dict(failure.metadata) == {
        "tenant": "small", "field": field, "queued": queued, "value": value, "limit": limit,
    }  # fmt: skip
    assert failure.retry_after_s is not None
    assert world.submit(10, adapter("c"), tenant="another").admitted
    world.run()
    assert world.submit(10, adapter("c"), tenant="small").admitted
    world.run()


def busy_world(**changes: object) -> World:
    """A world that has measured its turns and its rate of service."""
    world = World(limits(max_loras=1, num_pages=400, **changes))
    for number in range(30):
        world.submit(4, adapter("abc"[number % 3]), max_tokens=20)
    for _ in range(60):
        world.step()
    return world


def test_a_wait_beyond_the_engines_limit_is_refused_with_the_computed_wait() -> None:
    failure = failure_of(busy_world(max_queue_wait_s=0.05).submit(4, adapter("d")))
    assert (failure.code, failure.reason) == ("RESOURCE_EXHAUSTED", "WAIT_EXCEEDS_DEADLINE")
    metadata = dict(failure.metadata)
    assert float(metadata["wait_s"]) > float(metadata["limit_s"]) == 0.05
    assert failure.retry_after_s is not None
    assert failure.retry_after_s > 0


def test_a_wait_beyond_the_requests_own_deadline_is_refused() -> None:
    world = busy_world()
    failure = failure_of(world.submit(4, adapter("d"), deadline_s=world.clock.now() + 0.05))
    assert failure.reason == "WAIT_EXCEEDS_DEADLINE"
    assert world.submit(4, adapter("d"), deadline_s=world.clock.now() + 60).admitted


def test_nothing_is_refused_for_its_wait_before_anything_was_measured() -> None:
    world = World(limits(max_loras=1, max_queue_wait_s=0.001))
    assert all(world.submit(4, adapter(name)).admitted for name in "abcdef")


def test_a_long_queue_of_ones_own_is_part_of_the_wait() -> None:
    world = World(limits(max_num_seqs=1, max_queue_wait_s=2.0))
    refused = 0
    for _ in range(200):
        refused += not world.submit(4, max_tokens=20).admitted
        world.step()
    assert refused > 100
    waits = [h.ended.stats.waits.queue_s for h in world.heard.values() if h.ended and h.admitted]
    assert max(waits) < 4.0


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_that_divide_nothing_are_refused_by_name(weight: float) -> None:
    core = World(limits()).core
    with pytest.raises(ValueError, match="weight of tenant t is"):
        core.set_shares({"t": weight}, {})
    with pytest.raises(ValueError, match="weight of adapter sha256:a is"):
        core.set_shares({}, {"sha256:a": weight})


def test_a_quota_below_zero_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_queued_tokens of tenant t is -1"):
        World(limits()).core.set_quotas({"t": TenantQuota(1, -1)})
