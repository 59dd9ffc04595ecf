"""What the core counts and what only the composition root knows, as what the API shows."""

from __future__ import annotations

from engine_svc.core.snapshot import CoreCounts
from engine_svc.snapshots import CoreSnapshot, MemorySnapshot


def picture(
    core: CoreCounts,
    *,
    max_loras: int,
    weights_bytes: int,
    workspace_bytes: int,
    runtime_bytes: int = 0,
    host_cache_bytes: int,
) -> CoreSnapshot:
    """Pages become bytes. Keys and values that only the prefix cache keeps count as kv."""
    page_bytes = core.page_bytes
    return CoreSnapshot(
        steps=core.steps,
        max_loras=max_loras,
        running_sequences=core.running_sequences,
        waiting_sequences=core.waiting_sequences,
        draining=core.draining,
        slot_evictions=core.slot_evictions,
        memory=MemorySnapshot(
            weights_bytes=weights_bytes,
            kv_bytes=(core.kv_pages + core.cached_pages) * page_bytes,
            adapters_bytes=core.adapter_pages * page_bytes,
            free_bytes=core.free_pages * page_bytes,
            workspace_bytes=workspace_bytes,
            runtime_bytes=runtime_bytes,
            host_cache_bytes=host_cache_bytes,
            page_bytes=page_bytes,
            num_pages=core.num_pages,
        ),
        residents=core.residents,
        flows=core.flows,
        turns=core.turns,
        tenants=core.tenants,
        step_s=core.step_s,
    )
