"""`enginectl top` and `enginectl explain`: who is served, who waits, for what and how long."""

from __future__ import annotations

import argparse
import sys

from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.printing import size, table_text

#: cursor home, erase to the end of the screen
_CLEAR = "\x1b[H\x1b[J"
_CAUSES = {
    engine_pb2.WAIT_CAUSE_PLACE: "place",
    engine_pb2.WAIT_CAUSE_LOAD: "load",
    engine_pb2.WAIT_CAUSE_BYTES: "bytes",
    engine_pb2.WAIT_CAUSE_PAGES: "pages",
    engine_pb2.WAIT_CAUSE_SEAT: "seat",
    engine_pb2.WAIT_CAUSE_BUDGET: "budget",
}
#: cause → what the request waits for, in words
_LACKS = {
    engine_pb2.WAIT_CAUSE_PLACE: "all places are taken by other adapters",
    engine_pb2.WAIT_CAUSE_LOAD: "the adapter's weights are on their way",
    engine_pb2.WAIT_CAUSE_BYTES: "the arena has no pages free for the adapter itself",
    engine_pb2.WAIT_CAUSE_PAGES: "the arena has no pages free for its keys and values",
    engine_pb2.WAIT_CAUSE_SEAT: "all seats (max_num_seqs) are taken",
    engine_pb2.WAIT_CAUSE_BUDGET: "the next steps' tokens go to sequences before it",
}
_STATES = {
    engine_pb2.REQUEST_STATE_WAITING: "waits for its first step",
    engine_pb2.REQUEST_STATE_RUNNING: "runs",
    engine_pb2.REQUEST_STATE_PAUSED: "is paused between turns",
}


def show_top(arguments: argparse.Namespace) -> None:
    """Print the state, with --once once, else again and again. Raises: grpc.RpcError."""
    with insecure_channel(arguments.address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        if arguments.once:
            request = engine_pb2.GetEngineStateRequest()
            state = stub.GetEngineState(request, timeout=arguments.timeout).state
            print(screen(state, arguments.rows))
            return
        watch = engine_pb2.WatchEngineStateRequest(interval_s=arguments.interval)
        for answer in stub.WatchEngineState(watch):
            sys.stdout.write(_CLEAR + screen(answer.state, arguments.rows) + "\n")
            sys.stdout.flush()


def screen(state: engine_pb2.EngineState, max_rows: int) -> str:
    """One picture: turns, tenants, flows; holders of places first, then in the ring's order."""
    memory = state.memory
    holders = sum(one.holds_place for one in state.residency)
    parts = [
        f"{state.engine_id}  {state.base_model}  step {state.steps}"
        f" ({1000 * state.step_s:.1f} ms)  places {holders}/{state.max_loras}"
        f"  running {state.running_sequences}  waiting {state.waiting_sequences}"
        f"  kv {size(memory.kv_bytes)}  adapters {size(memory.adapters_bytes)}"
        f"  free {size(memory.free_bytes)}"
    ]
    if state.turns:
        columns = ("turn", "service", "quantum", "steps", "max steps", "closing")
        parts.append(
            table_text(columns, [_turn_row(turn, state.base_model) for turn in state.turns])
        )
    if state.tenants:
        of_tenants = (
            "tenant",
            "class",
            "ring",
            "in ring",
            "flows",
            "counter",
            "lag",
            "debt",
            "weight",
        )
        parts.append(table_text(of_tenants, [_tenant_row(one) for one in state.tenants[:max_rows]]))
        if len(state.tenants) > max_rows:
            parts.append(f"… and {len(state.tenants) - max_rows} tenants more")
    if state.flows:
        flows = sorted(state.flows, key=_order)
        columns_of_flows = (
            "flow", "tenant", "class", "ring", "waits for", "waited s", "bound s", "waiting",
            "running", "paused", "counter", "lag", "debt", "weight",
        )  # fmt: skip
        rows = [_flow_row(flow, state.base_model) for flow in flows[:max_rows]]
        parts.append(table_text(columns_of_flows, rows))
        if len(flows) > max_rows:
            parts.append(f"… and {len(flows) - max_rows} flows more")
    return "\n\n".join(parts)


def show_explanation(arguments: argparse.Namespace) -> None:
    """Print why a request waits. Raises: grpc.RpcError."""
    with insecure_channel(arguments.address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        request = engine_pb2.ExplainRequest(request_id=arguments.request_id)
        print(explanation(stub.Explain(request, timeout=arguments.timeout)))


def explanation(found: engine_pb2.ExplainResponse) -> str:
    """In sentences, one a line."""
    flow = found.flow
    name = flow.adapter.name or "the base model"
    lines = [
        f"request {found.request_id} of tenant {flow.tenant} for {name} "
        f"({_class_name(flow.service_class)}) {_STATES.get(found.state, 'is there')}"
    ]
    if found.waits_for:
        lines.append(f"it lacks: {_CAUSES[found.waits_for]} ({_LACKS[found.waits_for]})")
    if found.ahead:
        lines.append(f"{found.ahead} requests of its flow come before it")
    if flow.ring_position > 0:
        lines.append(
            f"{name} is number {flow.ring_position} of {found.demanding_adapters} in the ring for "
            f"{found.max_loras} places: at most {flow.wait_bound_s:.1f} s more"
        )
    elif flow.ring_position == 0:
        lines.append(f"{name} holds a place")
    else:
        lines.append(f"{name} enters the ring when its weights are here, with its time of arrival")
    waits = (
        ("place", found.wait_place_s),
        ("load", found.wait_load_s),
        ("kv", found.wait_kv_s),
        ("budget", found.wait_budget_s),
    )
    waited = sum(seconds for _, seconds in waits)
    parts = ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in waits)
    lines.append(f"waited {waited:.2f} s: {parts}; paused {found.paused_s:.2f} s")
    lines.append(
        f"{found.prompt_tokens} prompt tokens, {found.completion_tokens} tokens answered; its "
        f"flow's counter is {flow.virtual_counter:.0f}, lag {flow.service_lag:.0f}"
    )
    lines.append(
        f"it was charged {found.service:.0f}; its flow's debt is {flow.debt:.0f}, its weight "
        f"{flow.adapter_weight:g}; one more request of its flow would expect "
        f"{found.predicted_wait_s:.1f} s"
    )
    if found.HasField("tenant"):
        lines.append(_about_tenant(found.tenant))
    return "\n".join(lines)


def _about_tenant(tenant: engine_pb2.TenantState) -> str:
    place = f"number {tenant.ring_position}" if tenant.ring_position else "not"
    return (
        f"tenant {tenant.tenant} is {place} in the ring of tenants with {tenant.ring_flows} of its "
        f"{tenant.flows} flows; counter {tenant.virtual_counter:.0f}, lag {tenant.service_lag:.0f},"
        f" debt {tenant.debt:.0f}, weight {tenant.weight:g}"
    )


def _tenant_row(tenant: engine_pb2.TenantState) -> tuple[object, ...]:
    return (
        tenant.tenant,
        _class_name(tenant.service_class),
        tenant.ring_position or "-",
        tenant.ring_flows,
        tenant.flows,
        f"{tenant.virtual_counter:.0f}",
        f"{tenant.service_lag:.0f}",
        f"{tenant.debt:.0f}",
        f"{tenant.weight:g}",
    )


def _turn_row(turn: engine_pb2.TurnState, base_model: str) -> tuple[object, ...]:
    return (
        turn.adapter.name or base_model,
        round(turn.service),
        round(turn.quantum),
        turn.steps,
        turn.max_steps,
        "yes" if turn.closing else "-",
    )


def _flow_row(flow: engine_pb2.FlowState, base_model: str) -> tuple[object, ...]:
    return (
        flow.adapter.name or base_model,
        flow.tenant,
        _class_name(flow.service_class),
        {0: "place", -1: "load"}.get(flow.ring_position, str(flow.ring_position)),
        _CAUSES.get(flow.waits_for, "-"),
        f"{flow.waited_s:.2f}",
        f"{flow.wait_bound_s:.2f}",
        flow.waiting,
        flow.running,
        flow.paused,
        f"{flow.virtual_counter:.0f}",
        f"{flow.service_lag:.0f}",
        f"{flow.debt:.0f}",
        f"{flow.tenant_weight:g} × {flow.adapter_weight:g}",
    )


def _order(flow: engine_pb2.FlowState) -> tuple[int, int, str, str]:
    """Holders of places, the ring in its order, then what loads."""
    position = flow.ring_position
    return (1 if position > 0 else 2 * -position, position, flow.adapter.name, flow.tenant)


def _class_name(service_class: int) -> str:
    return "batch" if service_class == engine_pb2.SERVICE_CLASS_BATCH else "interactive"
