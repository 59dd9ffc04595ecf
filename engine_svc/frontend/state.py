"""The core's snapshot → the message that routers and `enginectl top` read."""

from __future__ import annotations

from engine_svc.frontend.models import identity_of
from engine_svc.types import CoreSnapshot, FlowSnapshot, MemorySnapshot, ResidentAdapter
from loraplex.engine.v1 import engine_pb2

_TIERS = {
    "disk": engine_pb2.RESIDENCY_TIER_DISK,
    "host": engine_pb2.RESIDENCY_TIER_HOST,
    "slot": engine_pb2.RESIDENCY_TIER_SLOT,
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
        ring_position=flow.ring_position,
        waited_s=flow.waited_s,
    )
