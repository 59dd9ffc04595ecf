"""Where the ring gives way to the counters, so that equal demand gets equal service.

The ring alone makes turns alike, not service: a tenant with many adapters has turns in all the
places while a tenant with one adapter has its own. So who is behind keeps its place for longer, and
takes seats before the ring does; both end after a part of `turn_max_steps`, which bounds the wait.
"""

from __future__ import annotations

from engine_svc.core.books import Books
from engine_svc.core.flow import Flow
from engine_svc.core.turns import Turn


def may_overstay(books: Books, turn: Turn) -> bool:
    """A turn that is due goes on while its flow demands and has had less than the one that would
    follow, within `turn_max_steps`. Others of its adapter do not keep the place by its counter."""
    if books.next_step - turn.first_step >= books.limits.turn_max_steps:
        return False
    if not (turn.flow.num_running or turn.flow.num_deferred):
        return False
    nexts = (*books.ring.first(1), books.ring.next_sibling(turn.flow))
    return any(other is not None and is_behind(turn.flow, other) for other in nexts)


def must_yield_seats(books: Books, flow: Flow) -> bool:
    """The seats that are free go to turns that are not due and have none, and to those behind the
    flow who wait in open turns, until it has waited for half a turn."""
    waited = books.next_step - flow.queued_step
    if not books.free_seats or waited >= books.limits.turn_max_steps // 2:
        return False
    wanted = 0
    for turn in books.turns.values():
        lane = turn.lane
        if turn.closing_since is not None or not lane.num_deferred:
            continue
        waiting = [f for f in lane.flows.values() if f.num_deferred and not _starts_later(books, f)]
        behind = sum(other.num_deferred for other in waiting if is_behind(other, flow))
        goes_on = not lane.running and turn.service < turn.allowance
        wanted += behind or (goes_on and any(_fits(books, other) for other in waiting))
    return wanted >= len(books.free_seats)


def _fits(books: Books, flow: Flow) -> bool:
    first = flow.first()
    return first is not None and first.num_seats_needed <= len(books.free_seats)


def _starts_later(books: Books, flow: Flow) -> bool:
    first = flow.first()
    return first is None or books.in_flight(first)


def is_behind(flow: Flow, other: Flow) -> bool:
    """`flow` has had less weighted service: its tenant, or inside a tenant the flow itself."""
    if flow.key.service_class is not other.key.service_class:
        return False
    if flow.account is other.account:
        return flow.share.counter < other.share.counter
    return flow.account.counter < other.account.counter
