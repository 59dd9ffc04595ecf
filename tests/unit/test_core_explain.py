"""What the core says of one request, and of turns and flows."""

from __future__ import annotations

import dataclasses

import pytest

from engine_svc.core.admission import predicted_wait_s
from engine_svc.snapshots import RequestExplanation
from engine_svc.types import ServiceClass
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
    assert runs.service == at.charges.total[holder.request.flow] > 0
    assert runs.tenant is not None
    waits = explained(at, second)
    assert (waits.state, waits.waits_for, waits.ahead) == ("waiting", "place", 1)
    assert explained(at, first).ahead == 0
    assert (waits.prompt_tokens, waits.max_loras) == (4, 1)
    assert waits.waits.place_s > 0
    assert waits.waits.queue_s > 0
    assert waits.flow.adapter_weight == 2.0
    assert waits.service == 0
    assert waits.predicted_wait_s == predicted_wait_s(at.core._books, second.request.flow)
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


@pytest.mark.parametrize(("pages", "steps"), [(64, 20), (11, 64)])
def test_the_picture_shows_the_steps_after_which_a_turn_is_due_now(pages: int, steps: int) -> None:
    at = World(limits(max_loras=1, num_pages=pages, turn_steps=20, turn_max_steps=64))
    at.submit(31, A, max_tokens=4)
    for _ in range(5):
        at.step()
    (turn,) = at.core.snapshot().turns
    assert turn.max_steps == steps


def test_the_bound_counts_the_places_that_have_seats_and_the_longest_copy() -> None:
    bounds: dict[tuple[int, int], float] = {}
    for copy_steps, choices in ((0, 1), (6, 1), (0, 2)):
        at = World(limits(max_loras=2, num_slots=4, max_num_seqs=3, turn_max_steps=64,
                          num_pages=400, quantum=1000))  # fmt: skip
        at.writer.delay = lambda steps=copy_steps: steps
        for ref in (A, B):
            at.submit(3, ref, max_tokens=40)
        for _ in range(2 * copy_steps + 4):
            at.step()
        at.submit(3, C)
        last = at.submit(3, adapter("d"), n=choices)
        for _ in range(2 * copy_steps + 4):
            at.step()
        bounds[copy_steps, choices] = explained(at, last).flow.wait_bound_s
    assert 0 < bounds[0, 1] < bounds[6, 1]
    # a request of two choices leaves seats for one place of the two
    assert bounds[0, 2] == pytest.approx(2 * bounds[0, 1])


def test_no_bound_is_shown_while_the_rings_head_lacks_pages() -> None:
    at = World(limits(max_loras=1, num_pages=12, prefix_cache=False), adapter_pages=4)
    at.submit(10, A, max_tokens=20)
    for _ in range(4):
        at.step()
    late = at.submit(10, B, max_tokens=4)
    lacked = 0
    while late.planned_s is None:
        at.step()
        if at.core._books.memory.kept_pages:
            assert explained(at, late).waits_for == "bytes"
            assert explained(at, late).flow.wait_bound_s == 0
            lacked += 1
    assert lacked > 0


def test_the_service_of_a_request_counts_its_prompt_once_and_nothing_that_was_found() -> None:
    at = World(limits(num_pages=200))
    for _ in range(2):
        at.submit(tuple(range(13)), A, max_tokens=2)
        at.run()
    heard = at.submit(tuple(range(13)), A, max_tokens=30, n=2)
    before = at.charges.total[heard.request.flow]
    for _ in range(6):
        at.step()
        shown = at.core.explain(heard.request.request_id)
        assert shown is not None
        assert shown.service == at.charges.total[heard.request.flow] - before
    assert at.charges.num_found > 0


def test_the_ring_of_tenants_is_shown_in_its_order_with_debts_and_weights() -> None:
    at = World(limits(max_loras=1, num_slots=3, turn_max_steps=64, quantum=40, closing_steps=30))
    at.core.set_shares({"u": 2.0}, {})
    at.submit(3, A, max_tokens=59, tenant="holder")
    for _ in range(3):
        at.step()
    for tenant, ref in (("u", B), ("t", C), ("u", C)):
        at.submit(3, ref, tenant=tenant)
    at.submit(3, C, tenant="t", service_class=ServiceClass.BATCH)
    for _ in range(3):
        at.step()
    shown = at.core.snapshot().tenants
    rows = {(one.tenant, one.ring_position, one.ring_flows, one.flows) for one in shown[:3]}
    first, second = dict.fromkeys(
        flow.key.tenant
        for flow in at.core._books.ring
        if flow.key.service_class is ServiceClass.INTERACTIVE
    )
    places = {first: 1, second: 2}
    assert rows == {("u", places["u"], 2, 2), ("t", places["t"], 1, 1), ("holder", 0, 0, 1)}
    assert [one.ring_position for one in shown] == [1, 2, 0, 1]
    assert {one.tenant: one.weight for one in shown} == {"u": 2.0, "t": 1.0, "holder": 1.0}
    assert shown[-1].service_class is ServiceClass.BATCH
    holder = shown[2]
    assert holder.virtual_counter > 0
    assert holder.service_lag < shown[0].service_lag
    while not any(one.debt for one in at.core.snapshot().tenants):
        at.step()
    debts = {f.flow.tenant: f.debt for f in at.core.snapshot().flows if f.debt}
    assert debts, "a tenant owes what none of its flows has overdrawn"
