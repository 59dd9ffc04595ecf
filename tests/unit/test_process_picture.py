"""What the core counts, as what GetEngineState shows."""

from __future__ import annotations

from engine_svc.core.snapshot import CoreCounts
from engine_svc.picture import picture
from engine_svc.snapshots import FlowSnapshot, ResidentAdapter, TenantSnapshot, TurnSnapshot
from engine_svc.types import AdapterRef, FlowKey, ServiceClass


def test_pages_become_bytes_and_all_of_the_arena_is_accounted_for() -> None:
    ref = AdapterRef("sql-lora", 2, "sha256:d")
    flow = FlowKey(ServiceClass.BATCH, "acme", ref.digest)
    core = CoreCounts(
        steps=9, running_sequences=2, waiting_sequences=3,
        flows=(FlowSnapshot(flow, ref, 1, 2, 3, ring_position=-1, waited_s=0.5),),
        residents=(ResidentAdapter(ref, "slot", 300, True),),
        num_pages=10, page_bytes=100, kv_pages=2, cached_pages=1,
        adapter_pages=3, free_pages=4, loading_adapters=0,
        slot_evictions=5, preemptions=0, draining=True,
        turns=(TurnSnapshot(ref, 1.0, 2.0, 3, 4),), step_s=0.25,
        tenants=(TenantSnapshot(ServiceClass.BATCH, "acme", 1, 1, 2),),
    )  # fmt: skip
    seen = picture(
        core, max_loras=2, weights_bytes=1000, workspace_bytes=50, runtime_bytes=7,
        host_cache_bytes=500,
    )  # fmt: skip
    memory = seen.memory
    assert (memory.kv_bytes, memory.adapters_bytes, memory.free_bytes) == (300, 300, 400)
    assert memory.kv_bytes + memory.adapters_bytes + memory.free_bytes == 10 * 100
    assert (memory.weights_bytes, memory.workspace_bytes, memory.host_cache_bytes) == (
        1000, 50, 500,
    )  # fmt: skip
    assert memory.runtime_bytes == 7
    assert (seen.max_loras, seen.steps, seen.draining) == (2, 9, True)
    assert seen.residents[0].adapter is ref
    assert seen.residents[0].holds_place
    (shown,) = seen.flows
    assert (shown.waiting, shown.running, shown.paused) == (1, 2, 3)
    assert (shown.ring_position, shown.waited_s) == (-1, 0.5)
    assert seen.slot_evictions == 5
    assert (seen.turns, seen.tenants, seen.step_s) == (core.turns, core.tenants, 0.25)
