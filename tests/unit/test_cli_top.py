"""What `enginectl top` and `enginectl explain` make of the engine's answers."""

from __future__ import annotations

from engine_svc.cli.top import explanation, screen
from loraplex.common.v1.common_pb2 import AdapterIdentity
from loraplex.engine.v1 import engine_pb2 as pb


def flow(name: str, ring: int, **fields: float) -> pb.FlowState:
    identity = AdapterIdentity(name=name, version=1) if name else AdapterIdentity()
    return pb.FlowState(
        service_class=pb.SERVICE_CLASS_INTERACTIVE, tenant="acme", adapter=identity,
        ring_position=ring, tenant_weight=1, adapter_weight=2, **fields,
    )  # fmt: skip


def test_holders_come_first_then_the_ring_in_its_order_then_what_loads() -> None:
    state = pb.EngineState(
        engine_id="e1", base_model="base", max_loras=2, steps=7, step_s=0.0125,
        flows=[flow("late", 2), flow("loads", -1), flow("first", 1), flow("holder", 0)],
        turns=[pb.TurnState(service=30, quantum=512, steps=3, max_steps=64, closing=True)],
    )  # fmt: skip
    shown = screen(state, 40)
    names = [name for line in shown.splitlines() for name in line.split()[:1]]
    assert [n for n in names if n in ("holder", "first", "late", "loads")] == [
        "holder", "first", "late", "loads",
    ]  # fmt: skip
    assert "step 7 (12.5 ms)" in shown
    (turn,) = [line for line in shown.splitlines() if line.startswith("base")]
    assert turn.split() == ["base", "30", "512", "3", "64", "yes"]


def test_a_long_list_is_cut_and_says_so() -> None:
    state = pb.EngineState(flows=[flow(f"a{i}", i + 1) for i in range(9)])
    assert "… and 6 flows more" in screen(state, 3)
    assert "a3" not in screen(state, 3)


def test_an_engine_at_rest_has_one_line() -> None:
    assert len(screen(pb.EngineState(engine_id="e1"), 40).splitlines()) == 1


def test_a_waiting_request_is_told_its_position_bound_and_what_it_lacks() -> None:
    found = pb.ExplainResponse(
        request_id="r1", state=pb.REQUEST_STATE_WAITING, waits_for=pb.WAIT_CAUSE_PLACE, ahead=2,
        flow=flow("sql-lora", 3, wait_bound_s=4.25, virtual_counter=100), demanding_adapters=9,
        max_loras=2, wait_place_s=1.5, prompt_tokens=8,
    )  # fmt: skip
    text = explanation(found)
    assert "request r1 of tenant acme for sql-lora (interactive) waits for its first step" in text
    assert "it lacks: place (all places are taken by other adapters)" in text
    assert "2 requests of its flow come before it" in text
    assert "number 3 of 9 in the ring for 2 places: at most 4.2 s more" in text
    assert "waited 1.50 s: place 1.50, load 0.00" in text


def test_a_running_request_lacks_nothing() -> None:
    found = pb.ExplainResponse(request_id="r1", state=pb.REQUEST_STATE_RUNNING, flow=flow("", 0))
    text = explanation(found)
    assert "for the base model (interactive) runs" in text
    assert "lacks" not in text
    assert "the base model holds a place" in text


def test_the_ring_of_tenants_is_a_table_of_its_own() -> None:
    tenants = [
        pb.TenantState(tenant="acme", ring_position=1, ring_flows=2, flows=3, weight=2, debt=7),
        pb.TenantState(tenant="idle", flows=1, weight=1),
    ]
    shown = screen(pb.EngineState(engine_id="e1", tenants=tenants), 1).splitlines()
    (row,) = [line for line in shown if line.startswith("acme")]
    assert row.split() == ["acme", "interactive", "1", "2", "3", "0", "0", "7", "2"]
    assert "… and 1 tenants more" in shown


def test_a_request_is_told_its_service_debt_weight_and_its_tenants_place() -> None:
    found = pb.ExplainResponse(
        request_id="r1", state=pb.REQUEST_STATE_WAITING, flow=flow("sql-lora", 3, debt=12),
        service=30, predicted_wait_s=2.5,
        tenant=pb.TenantState(tenant="acme", ring_position=2, ring_flows=4, flows=5, weight=3),
    )  # fmt: skip
    text = explanation(found)
    assert "it was charged 30; its flow's debt is 12, its weight 2;" in text
    assert "would expect 2.5 s" in text
    assert "tenant acme is number 2 in the ring of tenants with 4 of its 5 flows" in text
