"""The core's snapshot → the message that routers and `enginectl top` read."""

from __future__ import annotations

from engine_svc.frontend.models import identity_of
from engine_svc.snapshots import (
    CoreSnapshot,
    FlowSnapshot,
    MemorySnapshot,
    RequestExplanation,
    ResidentAdapter,
    TenantSnapshot,
    TurnSnapshot,
)
from loraplex.engine.v1 import engine_pb2

_TIERS = {
    "disk": engine_pb2.RESIDENCY_TIER_DISK,
    "host": engine_pb2.RESIDENCY_TIER_HOST,
    "slot": engine_pb2.RESIDENCY_TIER_SLOT,
}
_CAUSES = {
    "": engine_pb2.WAIT_CAUSE_UNSPECIFIED,
    "place": engine_pb2.WAIT_CAUSE_PLACE,
    "load": engine_pb2.WAIT_CAUSE_LOAD,
    "bytes": engine_pb2.WAIT_CAUSE_BYTES,
    "pages": engine_pb2.WAIT_CAUSE_PAGES,
    "seat": engine_pb2.WAIT_CAUSE_SEAT,
    "budget": engine_pb2.WAIT_CAUSE_BUDGET,
}
_STATES = {
    "waiting": engine_pb2.REQUEST_STATE_WAITING,
    "running": engine_pb2.REQUEST_STATE_RUNNING,
    "paused": engine_pb2.REQUEST_STATE_PAUSED,
}


def engine_state(
    snapshot: CoreSnapshot, *, engine_id: str, base_model: str, registry_revision: int
) -> engine_pb2.EngineState:
    return engine_pb2.EngineState(
        engine_id=engine_id,
        base_model=base_model,
        registry_revision=registry_revision,
        max_loras=snapshot.max_loras,
        running_sequences=snapshot.running_sequences,
        waiting_sequences=snapshot.waiting_sequences,
        steps=snapshot.steps,
        memory=_memory(snapshot.memory),
        residency=[_residency(resident) for resident in snapshot.residents],
        flows=[_flow(flow) for flow in snapshot.flows],
        turns=[_turn(turn) for turn in snapshot.turns],
        step_s=snapshot.step_s,
        tenants=[_tenant(tenant) for tenant in snapshot.tenants],
    )


def explained(found: RequestExplanation) -> engine_pb2.ExplainResponse:
    return engine_pb2.ExplainResponse(
        request_id=found.request_id,
        state=_STATES[found.state],
        waits_for=_CAUSES[found.waits_for],
        flow=_flow(found.flow),
        ahead=found.ahead,
        wait_place_s=found.waits.place_s,
        wait_load_s=found.waits.load_s,
        wait_kv_s=found.waits.kv_s,
        wait_budget_s=found.waits.budget_s,
        paused_s=found.paused_s,
        prompt_tokens=found.prompt_tokens,
        completion_tokens=found.completion_tokens,
        demanding_adapters=found.demanding_adapters,
        max_loras=found.max_loras,
        tenant=None if found.tenant is None else _tenant(found.tenant),
        service=found.service,
        predicted_wait_s=found.predicted_wait_s,
    )


def _turn(turn: TurnSnapshot) -> engine_pb2.TurnState:
    return engine_pb2.TurnState(
        adapter=identity_of(turn.adapter),
        service=turn.service,
        quantum=turn.quantum,
        steps=turn.steps,
        max_steps=turn.max_steps,
        closing=turn.closing,
    )


def _memory(memory: MemorySnapshot) -> engine_pb2.MemoryState:
    return engine_pb2.MemoryState(
        weights_bytes=memory.weights_bytes,
        kv_bytes=memory.kv_bytes,
        adapters_bytes=memory.adapters_bytes,
        free_bytes=memory.free_bytes,
        workspace_bytes=memory.workspace_bytes,
        host_cache_bytes=memory.host_cache_bytes,
        page_bytes=memory.page_bytes,
        num_pages=memory.num_pages,
    )


def _residency(resident: ResidentAdapter) -> engine_pb2.AdapterResidency:
    return engine_pb2.AdapterResidency(
        adapter=identity_of(resident.adapter),
        tier=_TIERS[resident.tier],
        bytes=resident.num_bytes,
        pinned=resident.pinned,
        holds_place=resident.holds_place,
    )


def _flow(flow: FlowSnapshot) -> engine_pb2.FlowState:
    return engine_pb2.FlowState(
        service_class=engine_pb2.ServiceClass.ValueType(flow.flow.service_class.value),
        tenant=flow.flow.tenant,
        adapter=identity_of(flow.adapter),
        waiting=flow.waiting,
        running=flow.running,
        paused=flow.paused,
        virtual_counter=flow.virtual_counter,
        ring_position=flow.ring_position,
        wait_bound_s=flow.wait_bound_s,
        waited_s=flow.waited_s,
        waits_for=_CAUSES[flow.waits_for],
        tenant_weight=flow.tenant_weight,
        adapter_weight=flow.adapter_weight,
        service_lag=flow.service_lag,
        debt=flow.debt,
    )


def _tenant(tenant: TenantSnapshot) -> engine_pb2.TenantState:
    return engine_pb2.TenantState(
        service_class=engine_pb2.ServiceClass.ValueType(tenant.service_class.value),
        tenant=tenant.tenant,
        ring_position=tenant.ring_position,
        ring_flows=tenant.ring_flows,
        flows=tenant.flows,
        weight=tenant.weight,
        virtual_counter=tenant.virtual_counter,
        service_lag=tenant.service_lag,
        debt=tenant.debt,
    )
