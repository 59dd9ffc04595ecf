"""Who holds a place: turns end here, and places, seats and first pages go to the ring's first.

A flow whose slot is still filling keeps its position and is passed over until it is ready. The
first that lacks seats, pages or tokens stops the round: what comes free is kept for it, but for
seats that somebody behind it waits for.
"""

from __future__ import annotations

from engine_svc.core.books import Books
from engine_svc.core.budget import has_budget
from engine_svc.core.draft import Draft
from engine_svc.core.flow import Flow
from engine_svc.core.lane import Lane
from engine_svc.core.lines import RING
from engine_svc.core.precedence import may_overstay, must_yield_seats
from engine_svc.core.pressure import Claim, are_pages_short
from engine_svc.core.start import try_start
from engine_svc.core.turns import Turn
from engine_svc.core.waits import Cause
from engine_svc.types import BASE_DIGEST


def close_turns(books: Books, now: float) -> None:
    """End turns that have nothing to run or have closed for long enough; close those that are
    due while somebody waits for what they hold, unless they are behind who would follow."""
    step, limits, scarce = books.next_step, books.limits, books.scarce
    num_lacking = max(0, len(books.placeless) - books.turns.num_free_places)
    num_closing, due, over = 0, list[Turn](), list[Turn]()
    # short while everybody can keep their pages; else as long as the bound of waits allows, so that
    # most sequences end before they are paused
    is_fair, is_long = limits.policy != "resident-first", are_pages_short(books)
    for turn in books.turns.values():
        lane = turn.lane
        if not scarce and (not num_lacking or lane.is_base):
            books.reopen_turn(turn)
        if turn.closing_since is not None:
            if not lane.has_work or turn.is_over(step, limits):
                over.append(turn)
            else:
                num_closing += 1
        elif not (lane.decoding or lane.num_prompts or lane.num_deferred):
            over.append(turn)
        elif is_fair:
            steps = turn.long_steps if is_long else turn.short_steps
            if turn.service >= turn.allowance or step - turn.first_step >= steps:
                due.append(turn)
    for turn in over:
        books.end_turn(turn, now)
    _close(books, due, num_lacking, num_closing, now)


def _close(books: Books, due: list[Turn], num_lacking: int, num_closing: int, now: float) -> None:
    """As many of the turns that are due as somebody waits for."""
    for turn in due:
        wanted = len(books.ring) if books.scarce else num_lacking * (not turn.lane.is_base)
        if num_closing >= wanted:
            continue
        if may_overstay(books, turn):
            turn.spend_freely()
        else:
            num_closing += 1
            turn.closing_since = books.next_step
            if not turn.lane.has_work:
                books.end_turn(turn, now)


def grant_places(books: Books, now: float) -> None:
    """Begin turns, each with its flow's first sequence, in the order of the ring."""
    books.lacking = None
    if not len(books.ring):
        return
    free = books.turns.num_free_places
    coming = books.ring.first(free + 1 + books.limits.prefetch_adapters)
    for position, flow in enumerate(coming):
        lane = flow.lane
        if lane.clock.cause is Cause.PLACE and not books.turns.has_place_for(lane):
            continue
        if flow.line == RING and not _grant(books, flow, position == 0, now):
            break
    else:
        for flow in _others_ready(books, set(coming)):
            if not _grant(books, flow, False, now):
                break
    _blame_loading(books, now)


def _grant(books: Books, flow: Flow, is_head: bool, now: float) -> bool:
    """Give the flow its turn if there is a place for it; False when it lacks something else."""
    lane, sequence = flow.lane, flow.first()
    assert sequence is not None, "a flow in the ring has nobody to run"
    if books.in_flight(sequence) or not _may_begin(books, flow, is_head, now):
        return True
    if must_yield_seats(books, flow):
        lane.blame(Cause.SEAT, now)
        return False
    lacking: Cause | None = Cause.BUDGET
    if has_budget(books, sequence):
        lacking = try_start(books, sequence, Claim.TURN, books.limits.min_chunk, now)
    if lacking is not None:
        lane.blame(lacking, now)
        books.lacking = lacking
        return False
    begin_turn(books, flow, now)
    return True


def _may_begin(books: Books, flow: Flow, is_head: bool, now: float) -> bool:
    """Its bytes are there, and a place is free or its adapter's own."""
    lane, turn = flow.lane, books.turns.get(flow.lane.digest)
    if not is_ready(books, lane):
        return False
    if turn is None:
        has_place = lane.is_base or books.turns.num_free_places > 0
        if not has_place:
            lane.blame(Cause.PLACE, now)
        return has_place
    if turn.closing_since is not None:
        return is_head
    # its adapter has a place already: seats go by counters, until it has waited for half a turn
    return books.next_step - flow.queued_step >= books.limits.turn_max_steps // 2


def begin_turn(books: Books, flow: Flow, now: float) -> None:
    """The flow's first sequence was started. An adapter that holds a place already, for another
    flow, keeps it; if that turn was closing, the flow's own begins in its place."""
    books.lines.granted(flow)
    turn = books.turns.get(flow.lane.digest)
    if turn is None:
        books.begin_turn(flow, now)
    elif turn.closing_since is not None:
        books.renew_turn(flow, now)


def end_unused_turns(books: Books, draft: Draft, num_in_flight: int, now: float) -> None:
    """A turn of which the step runs nothing is over, unless its adapter's next sequence starts once
    others have taken the seats or tokens of this step, or once the step in flight has ended."""
    used = {sequence.lane for sequence in draft.prompts}
    unused = [turn for turn in books.turns.values() if not turn.lane.rows and turn.lane not in used]
    for turn in unused:
        if turn.closing_since is None and turn.lane.num_deferred:
            others_go_on = num_in_flight > 0 or not draft.is_empty
            if draft.lacking in (Cause.SEAT, Cause.BUDGET) and others_go_on:
                continue
            if any(books.in_flight(sequence) for sequence in turn.lane.running.values()):
                continue
        books.end_turn(turn, now)


def _others_ready(books: Books, tried: set[Flow]) -> list[Flow]:
    """Flows behind the ring's first that could run at once while those load: a place, if any is
    left, is theirs; the base needs none. The oldest of each adapter, in the order of demand."""
    lanes = [books.lanes.get(BASE_DIGEST)]
    if books.turns.num_free_places:
        lanes += [books.lanes[digest] for digest in books.memory.slots.wanted]
    found = []
    for lane in lanes:
        if lane is not None and lane.num_in_ring and lane.digest not in books.turns:
            flows = [f for f in lane.flows.values() if f.line == RING and f not in tried]
            if flows and is_ready(books, lane):
                found.append(min(flows, key=lambda flow: flow.queued_at))
    return sorted(found, key=lambda flow: flow.queued_at)


def is_ready(books: Books, lane: Lane) -> bool:
    """Its bytes are in the arena; a turn that began just now may have evicted them."""
    return lane.is_base or books.memory.slots.ready(lane.digest) is not None


def _blame_loading(books: Books, now: float) -> None:
    """A free place that nobody can take: the ring's first wait for their copy into a slot."""
    free = books.turns.num_free_places
    for flow in books.ring.first(free) if free else ():
        lane = flow.lane
        if not is_ready(books, lane) and lane.clock.cause is not Cause.BYTES:
            lane.blame(Cause.LOAD, now)
