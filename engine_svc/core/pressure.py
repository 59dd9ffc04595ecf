"""Who gives pages when there are too few.

In this order, each only as far as needed: resting cached pages; idle slots that nobody in the ring
waits for, then those farthest from their turn; paused sequences, newest first; running sequences,
those of the highest virtual counter first, newest first among equals. Protected are the oldest
sequence, its adapter's slot unless rows are short, sequences that have not advanced since they
got their pages, the flow whose turn begins, and the slot at the ring's head. The oldest that could
run may take all but the first of these: somebody always comes to an end, so nothing can lock up.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from engine_svc.core.books import Books
from engine_svc.core.eviction import evict_row, evict_slots, oldest_live, oldest_runnable
from engine_svc.core.lane import Lane
from engine_svc.core.sequence import Sequence

#: a share of the arena's pages. With fewer to spare, sequences that pause would soon have to give
#: theirs to those that begin, and compute them again
SPARE_SHARE = 0.125


def are_pages_short(books: Books) -> bool:
    """Few pages are free, resting, or of adapters that nobody waits for."""
    least = SPARE_SHARE * books.limits.num_pages
    spare = books.memory.num_room
    if spare < least:
        spare += sum([len(slot.page_ids) for slot in books.memory.slots.unwanted.values()])
    return spare < least


class Claim(enum.IntEnum):
    """How much a request for pages may disturb."""

    #: a sequence that could start as well later: cached pages and unwanted slots
    MODEST = 0
    #: a running sequence: also paused ones, and running ones that are younger than it
    RUNNING = 1
    #: a turn that begins: also older running ones
    TURN = 2


def make_room(
    books: Books, count: int, sequence: Sequence, claim: Claim, now: float, kept: int = 0
) -> bool:
    """Make `count` pages free for a sequence, beside `kept` ones. False: not without taking what
    is protected; what was taken until then stays free."""
    needed = count + kept
    if books.memory.num_room >= needed:
        return True
    first = oldest_live(books)
    is_oldest = sequence is oldest_runnable(books)
    spared = {sequence.lane.digest}
    if not is_oldest:
        spared.update(flow.lane.digest for flow in books.ring.first(1))
    if evict_slots(books, needed, spared, now, wanted_too=is_oldest or claim is not Claim.MODEST):
        return True
    if claim is Claim.MODEST:
        return False

    def may_take(victim: Sequence) -> bool:
        if victim is sequence or victim is first or victim.exhausted or not victim.page_ids:
            return False
        return is_oldest or (victim.has_advanced and not _begins(books, victim))

    if _preempt_paused(books, needed, may_take, now):
        return True
    for victim in _running_most_served_first(books):
        younger = claim is Claim.TURN or is_oldest or victim.age > sequence.age
        if younger and may_take(victim):
            books.preempt(victim, now)
            if books.memory.num_room >= needed:
                return True
    return False


def make_room_for_load(
    books: Books, lane: Lane, count: int, ahead: set[str], urgent: bool, now: float
) -> bool:
    """Make `count` pages and a row free for an adapter's weights. Adapters `ahead` in the ring keep
    their slots; where it is `urgent`, paused sequences give their pages."""
    slots = books.memory.slots
    if not slots.num_free and not evict_row(books, ahead, now):
        return False
    if evict_slots(books, count, ahead, now):
        return True
    if not urgent:
        return False
    first, oldest = oldest_live(books), oldest_runnable(books)
    for_oldest = not ahead and oldest is not None and oldest.live.digest == lane.digest

    def may_take(victim: Sequence) -> bool:
        spared = not victim.has_advanced or _begins(books, victim)
        return victim is not first and (for_oldest or not spared)

    return _preempt_paused(books, count, may_take, now)


def _begins(books: Books, victim: Sequence) -> bool:
    """The turn of its flow begins in the step that is being planned."""
    turn = books.turns.get(victim.lane.digest)
    return turn is not None and turn.flow is victim.flow and turn.first_step == books.next_step


def _preempt_paused(
    books: Books, count: int, may_take: Callable[[Sequence], bool], now: float
) -> bool:
    while books.memory.num_room < count:
        victim = books.paused.newest(may_take)
        if victim is None:
            return False
        books.preempt(victim, now)
    return True


def _running_most_served_first(books: Books) -> list[Sequence]:
    running = [s for turn in books.turns for s in turn.lane.running.values()]
    return sorted(running, key=lambda s: (*s.flow.level, s.age), reverse=True)
