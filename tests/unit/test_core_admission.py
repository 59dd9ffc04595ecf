"""What is refused, when, and with which words."""

from __future__ import annotations

import dataclasses

import pytest

from engine_svc.core.limits import adapters_ahead
from engine_svc.types import Failure
from tests.support.core_world import Heard, World, limits


def refusal(heard: Heard) -> Failure:
    assert heard.ended is not None, "it was not refused"
    assert heard.ended.failure is not None
    assert not heard.admitted
    return heard.ended.failure


def test_an_empty_prompt_is_refused() -> None:
    assert refusal(World(limits()).submit(())).reason == "PROMPT_EMPTY"


def test_a_prompt_may_fill_the_context_but_for_one_token() -> None:
    world = World(limits(context_tokens=16))
    fits, too_long = world.submit(15, max_tokens=5), world.submit(16, max_tokens=1)
    failure = refusal(too_long)
    assert failure.reason == "PROMPT_TOO_LONG"
    assert dict(failure.metadata) == {"prompt_tokens": "16", "limit": "15"}
    world.run()
    assert len(fits.tokens[0]) == 1


def test_a_prompt_that_no_empty_arena_could_hold_is_refused() -> None:
    failure = refusal(World(limits(num_pages=4, context_tokens=64)).submit(17))
    assert failure.reason == "PROMPT_TOO_LONG"
    assert dict(failure.metadata)["limit"] == "16"
    assert "arena" in failure.message


def test_more_choices_than_seats_are_refused() -> None:
    failure = refusal(World(limits(max_num_seqs=4)).submit(5, n=5))
    assert failure.reason == "SAMPLING_INVALID"
    assert dict(failure.metadata) == {"field": "sampling.n", "value": "5", "limit": "at most 4"}


def test_a_deadline_that_has_passed_is_refused_before_any_work() -> None:
    world = World(limits())
    heard = world.submit(5, deadline_s=world.clock.now())
    assert refusal(heard).reason == "DEADLINE_EXCEEDED"
    assert world.step().idle


def test_a_full_queue_refuses_with_a_hint_when_to_come_back() -> None:
    world = World(limits(max_queued_requests=3, max_num_seqs=1))
    admitted = [world.submit(5, max_tokens=3) for _ in range(3)]
    failure = refusal(world.submit(5))
    assert failure.reason == "QUEUE_FULL"
    assert failure.code == "RESOURCE_EXHAUSTED"
    assert dict(failure.metadata) == {"queued": "3", "limit": "3"}
    assert failure.retry_after_s is not None
    assert 0 < failure.retry_after_s <= 30
    world.step()
    # the first one runs, so there is room in the queue
    assert world.submit(5).admitted
    world.run()
    assert all(heard.ended and heard.ended.failure is None for heard in admitted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_loras": 0}, "max_loras is 0; must be at least 1"),
        ({"num_slots": 1}, "num_slots is 1; must be at least 2"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens is 7; must be at least 8"),
        ({"quantum": 15}, "quantum is 15; must be 0 .auto. or at least 16"),
        ({"batch_grant_every": 1}, "batch_grant_every is 1; must be at least 2"),
        ({"decode_price": 0.0}, "decode_price is 0.0; must be a finite number above 0"),
        ({"prefill_price": float("nan")}, "prefill_price is nan"),
        ({"max_queue_wait_s": float("inf")}, "max_queue_wait_s is inf"),
        ({"policy": "lifo"}, "policy is 'lifo'; must be one of fair, resident-first"),
        ({"context_tokens": 1}, "context_tokens is 1; must be at least 2"),
        ({"turn_steps": -1}, "turn_steps is -1; must be at least 0"),
        ({"closing_steps": -1}, "closing_steps is -1; must be at least 0"),
        ({"run_ahead": 2}, "run_ahead is 2; must be 0 or 1"),
    ],
)
def test_limits_that_contradict_each_other_stop_the_start(
    change: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        World(dataclasses.replace(limits(), **change))


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    "name",
    [
        "max_num_seqs", "num_pages", "page_size", "page_bytes", "max_queued_requests",
        "max_queued_tokens", "turn_max_steps", "min_chunk", "prefetch_adapters", "max_wanted",
    ],
)  # fmt: skip
def test_a_limit_that_lets_nothing_run_stops_the_start(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}; must be at least 1"):
        World(dataclasses.replace(limits(), **{name: value}))


@pytest.mark.parametrize("name", ["prefill_price", "decode_price", "max_queue_wait_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_a_price_or_a_wait_that_is_no_positive_number_stops_the_start(
    name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}; must be a finite number above 0"):
        World(dataclasses.replace(limits(), **{name: value}))


@pytest.mark.parametrize(
    ("places", "ahead"), [(1, (2, 16)), (4, (2, 16)), (8, (4, 16)), (64, (32, 128))]
)
def test_adapters_are_copied_for_half_of_the_places_and_wanted_for_twice_as_many(
    places: int, ahead: tuple[int, int]
) -> None:
    assert adapters_ahead(places) == ahead
