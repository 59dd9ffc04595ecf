"""What the core can count of itself, in pages. Made on request, never per step.

engine_svc/picture.py adds what only the composition root knows, and turns pages into bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.books import Books
from engine_svc.core.flow import Flow
from engine_svc.core.limits import longest_turn
from engine_svc.core.lines import RING
from engine_svc.core.loads import Loads
from engine_svc.core.pressure import are_pages_short
from engine_svc.core.sequence import LiveRequest
from engine_svc.core.shares import Share
from engine_svc.core.slots import SlotState
from engine_svc.core.waits import Cause
from engine_svc.snapshots import FlowSnapshot, ResidentAdapter, TenantSnapshot, TurnSnapshot
from engine_svc.types import FlowKey, ServiceClass


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
    turns: tuple[TurnSnapshot, ...] = ()
    tenants: tuple[TenantSnapshot, ...] = ()
    #: smoothed seconds of a step
    step_s: float = 0.0


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
        turns=_turns(books),
        tenants=tenant_snapshots(books),
        step_s=books.rates.step_s,
    )


def _flows(books: Books, now: float) -> tuple[FlowSnapshot, ...]:
    oldest: dict[FlowKey, LiveRequest] = {}
    for live in books.requests.values():
        if live.waits is None:
            oldest.setdefault(live.request.flow, live)
    return tuple(
        flow_snapshot(books, flow, oldest.get(flow.key), now)
        for lane in books.lanes.values()
        for flow in lane.flows.values()
    )


def flow_snapshot(books: Books, flow: Flow, oldest: LiveRequest | None, now: float) -> FlowSnapshot:
    """`oldest` is the flow's oldest request that has not been planned."""
    lane = flow.lane
    return FlowSnapshot(
        flow.key,
        lane.ref,
        len(flow.waiting),
        flow.num_running,
        len(flow.suspended),
        ring_position=_position(books, flow),
        waited_s=0.0 if oldest is None else now - oldest.request.received_s,
        virtual_counter=flow.share.counter,
        wait_bound_s=wait_bound_s(books, flow),
        waits_for=lane.clock.cause.name.lower() if flow.num_deferred else "",
        tenant_weight=flow.account.weight,
        adapter_weight=flow.share.weight,
        service_lag=flow.account.virtual - flow.share.counter,
        debt=flow.share.debt,
    )


def tenant_snapshots(books: Books) -> tuple[TenantSnapshot, ...]:
    """Tenants with live flows: the ring's of each class in its order, then the others by name."""
    num_flows: dict[tuple[ServiceClass, str], int] = {}
    accounts: dict[tuple[ServiceClass, str], Share] = {}
    for lane in books.lanes.values():
        for key, flow in lane.flows.items():
            one = (key.service_class, key.tenant)
            accounts[one] = flow.account
            num_flows[one] = num_flows.get(one, 0) + 1
    places: dict[Share, tuple[int, int]] = {}
    for service_class in ServiceClass:
        for place, (account, count) in enumerate(books.ring.tenants(service_class), start=1):
            places[account] = (place, count)
    rows = []
    for (service_class, tenant), account in accounts.items():
        place, count = places.get(account, (0, 0))
        assert account.parent is not None
        rows.append(
            TenantSnapshot(
                service_class,
                tenant,
                ring_position=place,
                ring_flows=count,
                flows=num_flows[service_class, tenant],
                weight=account.weight,
                virtual_counter=account.counter,
                service_lag=account.parent.virtual - account.counter,
                debt=account.debt,
            )
        )
    return tuple(
        sorted(rows, key=lambda r: (r.service_class, r.ring_position or len(rows) + 1, r.tenant))
    )


def _turns(books: Books) -> tuple[TurnSnapshot, ...]:
    is_long = are_pages_short(books)
    return tuple(
        TurnSnapshot(
            turn.lane.ref,
            service=turn.service,
            quantum=turn.allowance,
            steps=books.next_step - turn.first_step,
            max_steps=turn.long_steps if is_long else turn.short_steps,
            closing=turn.closing_since is not None,
        )
        for turn in books.turns
    )


def _position(books: Books, flow: Flow) -> int:
    if flow.line == RING and flow.lane.digest not in books.turns:
        return books.ring.num_before(flow) + 1
    return -1 if flow.lane.is_absent else 0


def wait_bound_s(books: Books, flow: Flow) -> float:
    """The most seconds until a flow that stands in the ring is planned, at the measured length of a
    step; 0: it does not, or no bound holds now.

    ⌈N·k/M⌉ rounds with N·k the grants before its own and M the places that have seats; one more if
    its bytes are not in a slot, since a place may go by while they are copied. A round is T steps
    and the longest copy. While the ring's head lacks pages there is no bound: the oldest sequence
    keeps its own for as long as it runs.
    """
    lacks_pages = books.lacking is Cause.PAGES or books.memory.kept_pages > 0
    if flow.line != RING or lacks_pages or any(turn.is_rescue for turn in books.turns.values()):
        return 0.0
    limits, rates, digest = books.limits, books.rates, flow.lane.digest
    places = max(1, min(limits.max_loras, limits.max_num_seqs // books.widest))
    rounds = books.ring.num_before(flow) // places + 1
    if not flow.lane.is_base and books.memory.slots.ready(digest) is None:
        rounds += 1
    return rounds * (longest_turn(limits) * rates.step_s + rates.longest_copy_s)


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
