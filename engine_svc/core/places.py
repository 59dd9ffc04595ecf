"""Who holds a place: turns end here, and places, seats and first pages go to the ring's first.

An adapter whose slot is still filling keeps its position and is passed over until it is ready. The
first that lacks seats or pages stops the round: what comes free is kept for it.
"""

from __future__ import annotations

from collections.abc import Container

from engine_svc.core.books import Books
from engine_svc.core.lane import Lane
from engine_svc.core.pressure import Claim
from engine_svc.core.start import try_start
from engine_svc.core.waits import Cause
from engine_svc.types import BASE_DIGEST


def close_turns(books: Books, now: float) -> None:
    """End turns that have nothing to run or have closed for long enough; close those that are
    due while somebody waits for what they hold."""
    step, limits = books.next_step, books.limits
    num_lacking = max(0, books.ring.num_adapters - books.turns.num_free_places)
    num_closing = 0
    for turn in books.turns:
        if not turn.lane.num_deferred and all(s.exhausted for s in turn.lane.running.values()):
            books.end_turn(turn, now)
        elif turn.closing_since is not None and not (num_lacking or books.scarce):
            turn.closing_since = None
        elif turn.is_over(step, limits):
            books.end_turn(turn, now)
        elif turn.closing_since is not None:
            num_closing += 1
    for turn in books.turns:
        if turn.closing_since is None and turn.is_due(step, limits):
            wanted = len(books.ring) if books.scarce else num_lacking * (not turn.lane.is_base)
            if num_closing < wanted:
                turn.closing_since = step
                num_closing += 1


def grant_places(books: Books, now: float) -> None:
    """Begin turns, each with its lane's first sequence."""
    books.lacking = None
    if not len(books.ring):
        return
    for lane in _ready_lanes(books):
        if not is_ready(books, lane):
            continue
        sequence = lane.first()
        assert sequence is not None, "a lane in the ring has nobody to run"
        if not lane.is_base and not books.turns.num_free_places:
            lane.blame(Cause.PLACE, now)
            continue
        if sequence.in_flight:
            continue
        lacking = try_start(books, sequence, Claim.TURN, books.limits.min_chunk, now)
        if lacking is not None:
            lane.blame(lacking, now)
            books.lacking = lacking
            break
        begin_turn(books, lane, now)
    _blame_loading(books, now)


def begin_turn(books: Books, lane: Lane, now: float) -> None:
    """The lane has a place; its first sequence was started."""
    books.leave_line(lane)
    books.memory.slots.touch(lane.digest)
    lane.blame(Cause.BUDGET, now)
    books.turns.begin(lane, books.next_step)


def end_unused_turns(books: Books, lanes_in_plan: Container[Lane], now: float) -> None:
    """A turn of which the step runs nothing is over."""
    for turn in books.turns:
        if turn.lane not in lanes_in_plan:
            books.end_turn(turn, now)


def _ready_lanes(books: Books) -> list[Lane]:
    """Lanes of the ring that could run in this step, in its order; found from the ring or from
    the slots, whichever are fewer."""
    base = books.lanes.get(BASE_DIGEST)
    if not books.turns.num_free_places:
        return [base] if base is not None and base.in_ring else []
    slots = books.memory.slots
    if len(books.ring) <= slots.num_slots:
        return [lane for lane in books.ring if is_ready(books, lane)]
    found = [base, *(books.lanes.get(slot.digest) for slot in slots.all())]
    ready = [lane for lane in found if lane is not None and lane.in_ring and is_ready(books, lane)]
    return sorted(ready, key=lambda lane: lane.queued_at)


def is_ready(books: Books, lane: Lane) -> bool:
    """Its bytes are in the arena; a turn that began just now may have evicted them."""
    return lane.is_base or books.memory.slots.ready(lane.digest) is not None


def _blame_loading(books: Books, now: float) -> None:
    """A free place that nobody can take: the ring's first wait for their copy into a slot."""
    free = books.turns.num_free_places
    for lane in books.ring.first(free) if free else ():
        if is_ready(books, lane):
            continue
        if lane.clock.cause is not Cause.BYTES:
            lane.blame(Cause.LOAD, now)
