"""What the core can count of itself, in pages. Made on request, never per step.

engine_svc/picture.py adds what only the composition root knows, and turns pages into bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.books import Books
from engine_svc.core.lane import Lane
from engine_svc.core.loads import Loads
from engine_svc.core.sequence import SequenceState
from engine_svc.core.slots import SlotState
from engine_svc.types import AdapterRef, FlowKey, FlowSnapshot, ResidentAdapter


@dataclass(frozen=True, slots=True)
class CoreCounts:
    """Pages count arena pages; kv + cached + adapters + free = num_pages."""

    steps: int
    running_sequences: int
    waiting_sequences: int
    flows: tuple[FlowSnapshot, ...]
    residents: tuple[ResidentAdapter, ...]
    num_pages: int
    page_bytes: int
    kv_pages: int
    cached_pages: int
    adapter_pages: int
    free_pages: int
    loading_adapters: int
    slot_evictions: int
    preemptions: int
    draining: bool


def take_counts(books: Books, loads: Loads, now: float, draining: bool) -> CoreCounts:
    memory, limits = books.memory, books.limits
    slots = memory.slots.all()
    adapter_pages = sum(len(slot.page_ids) for slot in slots)
    return CoreCounts(
        steps=books.next_step,
        running_sequences=books.num_running,
        waiting_sequences=sum(books.deferred),
        flows=_flows(books, now),
        residents=_residents(books),
        num_pages=limits.num_pages,
        page_bytes=limits.page_bytes,
        kv_pages=limits.num_pages - memory.num_room - adapter_pages,
        cached_pages=memory.index.num_resting,
        adapter_pages=adapter_pages,
        free_pages=memory.pool.num_free,
        loading_adapters=loads.num_asked + loads.num_filling,
        slot_evictions=memory.slots.num_evictions,
        preemptions=books.num_preempted,
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
            ring_position=_position(books, books.lanes[flow.digest]),
            waited_s=waited.get(flow, 0.0),
        )
        for flow, (waiting, running, paused) in counts.items()
    )


def _position(books: Books, lane: Lane) -> int:
    if lane.in_ring:
        return books.ring.position(lane) + 1
    return -1 if lane.digest in books.absent else 0


def _residents(books: Books) -> tuple[ResidentAdapter, ...]:
    slots = books.memory.slots
    rows = [
        ResidentAdapter(
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
            rows.append(ResidentAdapter(lane.ref, "host", num_bytes))
    return tuple(rows)
