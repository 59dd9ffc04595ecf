"""What the core says of one request, and of turns and flows."""

from __future__ import annotations

import dataclasses

from engine_svc.types import RequestExplanation
from tests.support.core_world import Heard, World, adapter, limits

A, B, C = adapter("a"), adapter("b", weight=2.0), adapter("c")


def world() -> World:
    return World(limits(max_loras=1, num_slots=3, turn_max_steps=64))


def explained(at: World, heard: Heard) -> RequestExplanation:
    found = at.core.explain(heard.request.request_id)
    assert found is not None
    return found


def test_a_request_behind_others_is_told_its_cause_and_its_place_in_the_ring() -> None:
    at = world()
    holder = at.submit(3, A, max_tokens=30)
    first, second = at.submit(3, B), at.submit(4, B)
    last = at.submit(3, C)
    for _ in range(6):
        at.step()
    runs = explained(at, holder)
    assert (runs.state, runs.waits_for, runs.flow.ring_position) == ("running", "", 0)
    assert runs.completion_tokens > 0
    waits = explained(at, second)
    assert (waits.state, waits.waits_for, waits.ahead) == ("waiting", "place", 1)
    assert explained(at, first).ahead == 0
    assert (waits.prompt_tokens, waits.max_loras) == (4, 1)
    assert waits.waits.place_s > 0
    assert waits.waits.queue_s > 0
    assert waits.flow.adapter_weight == 2.0
    assert explained(at, last).flow.ring_position == waits.flow.ring_position + 1
    assert explained(at, last).flow.wait_bound_s > waits.flow.wait_bound_s > 0


def test_the_clients_id_is_found_too_and_of_equal_ones_the_oldest() -> None:
    at = world()
    for heard in [at.submit(tokens, A) for tokens in (3, 5)]:
        own = f"own-{heard.request.request_id}"
        named = dataclasses.replace(heard.request, request_id=own, client_request_id="mine")
        at.core.submit(named)
    found = at.core.explain("mine")
    assert found is not None
    assert (found.request_id, found.prompt_tokens) == ("mine", 3)


def test_what_has_ended_or_never_was_is_not_explained() -> None:
    at = world()
    heard = at.submit(3, A)
    at.run()
    assert at.core.explain(heard.request.request_id) is None
    assert at.core.explain("nobody") is None


def test_the_picture_shows_turns_causes_and_weights() -> None:
    at = world()
    at.core.set_shares({"default": 4.0}, {A.digest: 3.0})
    at.submit(3, A, max_tokens=30)
    at.submit(3, B)
    for _ in range(6):
        at.step()
    shown = at.core.snapshot()
    (turn,) = shown.turns
    assert turn.adapter == A
    assert 0 < turn.service < turn.quantum
    assert 0 < turn.steps <= turn.max_steps == 64
    flows = {flow.adapter.name: flow for flow in shown.flows if flow.adapter}
    assert (flows["a"].waits_for, flows["b"].waits_for) == ("", "place")
    assert (flows["a"].tenant_weight, flows["a"].adapter_weight) == (4.0, 3.0)
    assert flows["a"].virtual_counter > 0
    assert flows["b"].service_lag > flows["a"].service_lag
    assert shown.step_s > 0
