"""What the core shows of itself, frozen: for GetEngineState, Explain, metrics and `top`."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_svc.types import AdapterRef, FlowKey, ServiceClass, Waits


@dataclass(frozen=True, slots=True)
class ResidentAdapter:
    """One adapter whose weights are near. `tier`: "disk", "host" or "slot"."""

    adapter: AdapterRef
    tier: str
    num_bytes: int
    holds_place: bool = False
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class FlowSnapshot:
    """One flow with its sequences by state; `adapter` is None for the base model."""

    flow: FlowKey
    adapter: AdapterRef | None = None
    waiting: int = 0
    running: int = 0
    paused: int = 0
    #: 1, 2 … in the ring; 0: it holds a place; −1: its weights are on their way
    ring_position: int = 0
    #: how long its oldest request that has not been planned has waited
    waited_s: float = 0.0
    #: weighted service so far, as its tenant counts it; the least is served first
    virtual_counter: float = 0.0
    #: the longest that it can still wait for a place, at the measured length of a step
    wait_bound_s: float = 0.0
    #: what its oldest waiting request lacks: the name of a core cause; "" = nothing waits
    waits_for: str = ""
    tenant_weight: float = 1.0
    adapter_weight: float = 1.0
    #: how far its counter is behind its tenant's virtual time; below 0: ahead
    service_lag: float = 0.0
    #: service beyond the quantums of its turns, taken off its next ones
    debt: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """One tenant's part of a class: what its flows have together, and its place in the ring."""

    service_class: ServiceClass
    tenant: str
    #: 1, 2 … among the tenants of its class whose adapters want a place; 0: none of its does
    ring_position: int = 0
    #: its flows that stand in the ring, and all of its
    ring_flows: int = 0
    flows: int = 0
    weight: float = 1.0
    #: as FlowSnapshot's, among the tenants of its class
    virtual_counter: float = 0.0
    service_lag: float = 0.0
    debt: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnSnapshot:
    """One adapter in a place; `adapter` is None for the base model."""

    adapter: AdapterRef | None
    service: float
    #: service after which it ends while somebody waits
    quantum: float
    steps: int
    #: steps after which it ends while somebody waits: by its weight, and fewer while pages are to
    #: spare; turn_max_steps where its flow is behind who would follow
    max_steps: int
    closing: bool = False


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """Why one open request waits. `state`: "waiting", "running" or "paused"."""

    request_id: str
    state: str
    flow: FlowSnapshot
    #: as FlowSnapshot.waits_for
    waits_for: str = ""
    #: requests of its flow that come before it
    ahead: int = 0
    waits: Waits = field(default_factory=Waits)
    paused_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    demanding_adapters: int = 0
    max_loras: int = 0
    tenant: TenantSnapshot | None = None
    #: what it was charged until now: computed tokens at their prices
    service: float = 0.0
    #: what admission would expect now for one more request of its flow
    predicted_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Bytes by use."""

    weights_bytes: int = 0
    kv_bytes: int = 0
    adapters_bytes: int = 0
    free_bytes: int = 0
    workspace_bytes: int = 0
    #: what the device holds beyond all this: context, kernels, graphs, libraries
    runtime_bytes: int = 0
    host_cache_bytes: int = 0
    page_bytes: int = 0
    num_pages: int = 0


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """One picture of residency, queues and memory, taken between two steps."""

    steps: int = 0
    max_loras: int = 0
    running_sequences: int = 0
    waiting_sequences: int = 0
    draining: bool = False
    #: adapters that left a slot in the engine's life
    slot_evictions: int = 0
    memory: MemorySnapshot = field(default_factory=MemorySnapshot)
    residents: tuple[ResidentAdapter, ...] = ()
    flows: tuple[FlowSnapshot, ...] = ()
    turns: tuple[TurnSnapshot, ...] = ()
    tenants: tuple[TenantSnapshot, ...] = ()
    #: smoothed seconds of a step
    step_s: float = 0.0
