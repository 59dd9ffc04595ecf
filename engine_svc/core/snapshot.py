"""One picture of the core: flows, residency, memory, counters. Made on request, never per step."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.books import Books
from engine_svc.core.lane import Lane
from engine_svc.core.loads import Loads
from engine_svc.core.sequence import SequenceState
from engine_svc.core.slots import SlotState
from engine_svc.types import AdapterRef, FlowKey


@dataclass(frozen=True, slots=True)
class FlowSnapshot:
    """Sequences of one flow. `ring_position` 0: it holds a place; −1: its weights load."""

    flow: FlowKey
    adapter: AdapterRef | None
    waiting: int
    running: int
    paused: int
    service: int
    ring_position: int
    #: how long its oldest request that has not been planned has waited
    waited_s: float


@dataclass(frozen=True, slots=True)
class ResidencySnapshot:
    """An adapter that lies on the host for the core, or in a slot."""

    adapter: AdapterRef
    tier: str
    num_bytes: int
    holds_place: bool


@dataclass(frozen=True, slots=True)
class CoreSnapshot:
    """Pages count arena pages; kv + cached + adapters + free = num_pages."""

    steps: int
    running_sequences: int
    waiting_sequences: int
    flows: tuple[FlowSnapshot, ...]
    residency: tuple[ResidencySnapshot, ...]
    #: digests that live requests hold
    pinned_digests: frozenset[str]
    num_pages: int
    page_bytes: int
    kv_pages: int
    cached_pages: int
    adapter_pages: int
    adapter_used_bytes: int
    free_pages: int
    loading_adapters: int
    slot_evictions: int
    failed_loads: int
    preemptions: int
    requests_ended: int
    requests_failed: int
    draining: bool


def take_snapshot(books: Books, loads: Loads, now: float, draining: bool) -> CoreSnapshot:
    memory, limits = books.memory, books.limits
    slots = memory.slots.all()
    adapter_pages = sum(len(slot.page_ids) for slot in slots)
    return CoreSnapshot(
        steps=books.next_step,
        running_sequences=books.num_running,
        waiting_sequences=sum(books.deferred),
        flows=_flows(books, now),
        residency=_residency(books),
        pinned_digests=frozenset(digest for digest in books.lanes if digest),
        num_pages=limits.num_pages,
        page_bytes=limits.page_bytes,
        kv_pages=limits.num_pages - memory.num_room - adapter_pages,
        cached_pages=memory.index.num_resting,
        adapter_pages=adapter_pages,
        adapter_used_bytes=sum(slot.weights.used_bytes for slot in slots),
        free_pages=memory.pool.num_free,
        loading_adapters=loads.num_asked + loads.num_filling,
        slot_evictions=memory.slots.num_evictions,
        failed_loads=loads.num_failed,
        preemptions=books.num_preempted,
        requests_ended=books.num_ended,
        requests_failed=books.num_failed,
        draining=draining,
    )


def _flows(books: Books, now: float) -> tuple[FlowSnapshot, ...]:
    counts: dict[FlowKey, list[int]] = {}
    adapters: dict[FlowKey, AdapterRef | None] = {}
    waited: dict[FlowKey, float] = {}
    column = {SequenceState.WAITING: 0, SequenceState.RUNNING: 1, SequenceState.SUSPENDED: 2}
    for live in books.requests.values():
        flow = live.request.flow
        row = counts.setdefault(flow, [0, 0, 0])
        adapters.setdefault(flow, live.request.adapter)
        for sequence in live.sequences:
            if sequence.state in column:
                row[column[sequence.state]] += 1
        if live.waits is None:
            waited.setdefault(flow, now - live.request.received_s)
    return tuple(
        FlowSnapshot(
            flow,
            adapters[flow],
            waiting,
            running,
            paused,
            _service(books, books.lanes[flow.digest]),
            _position(books, books.lanes[flow.digest]),
            waited.get(flow, 0.0),
        )
        for flow, (waiting, running, paused) in counts.items()
    )


def _service(books: Books, lane: Lane) -> int:
    turn = books.turns.get(lane.digest)
    return 0 if turn is None else turn.service


def _position(books: Books, lane: Lane) -> int:
    if lane.in_ring:
        return books.ring.position(lane) + 1
    return -1 if lane.digest in books.absent else 0


def _residency(books: Books) -> tuple[ResidencySnapshot, ...]:
    slots = books.memory.slots
    rows = [
        ResidencySnapshot(
            slot.ref, "slot", len(slot.page_ids) * books.limits.page_bytes,
            slot.digest in books.turns,
        )
        for slot in slots.all()
        if slot.state is SlotState.READY
    ]  # fmt: skip
    for digest, weights in books.on_host.items():
        lane = books.lanes.get(digest)
        if lane is not None and lane.ref is not None:
            num_bytes = weights.num_pages * books.limits.page_bytes
            rows.append(ResidencySnapshot(lane.ref, "host", num_bytes, False))
    return tuple(rows)
