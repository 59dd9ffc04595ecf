"""Who gives pages when there are too few.

In this order, each only as far as needed: resting cached pages; idle slots that nobody in the ring
waits for, then those farthest from their turn; paused sequences, newest first; running sequences,
those of the highest virtual counter first, newest first among equals. Protected are the oldest
sequence and its adapter's slot, sequences that have not advanced since they got their pages, and
the slot at the ring's head. The oldest that could run may take all but the first of these: somebody
always comes to an end, so nothing can lock up.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

from engine_svc.core.books import Books
from engine_svc.core.lane import Lane
from engine_svc.core.sequence import Sequence, SequenceState
from engine_svc.core.slots import Slot


class Claim(enum.IntEnum):
    """How much a request for pages may disturb."""

    #: a sequence that could start as well later: cached pages and unwanted slots
    MODEST = 0
    #: a running sequence: also paused ones, and running ones that are younger than it
    RUNNING = 1
    #: a turn that begins: also older running ones
    TURN = 2


def oldest_live(books: Books) -> Sequence | None:
    """The sequence that arrived first: nobody takes its pages, even while its adapter loads."""
    return next(_by_arrival(books), None)


def oldest_runnable(books: Books) -> Sequence | None:
    """The sequence that arrived first among those whose adapter is not loading."""
    return next((s for s in _by_arrival(books) if s.live.digest not in books.absent), None)


def _by_arrival(books: Books) -> Iterator[Sequence]:
    for live in books.requests.values():
        for sequence in live.sequences:
            if sequence.state is not SequenceState.ENDED and not sequence.exhausted:
                yield sequence


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
    lane = sequence.lane
    if _evict(books, needed, lambda slot: _is_spare(books, slot, claim, is_oldest), lane, now):
        return True
    if claim is Claim.MODEST:
        return False

    def may_take(victim: Sequence) -> bool:
        if victim is sequence or victim is first or victim.exhausted or not victim.page_ids:
            return False
        return is_oldest or victim.has_advanced

    if _preempt_paused(books, needed, may_take, now):
        return True
    for victim in _running_most_served_first(books):
        younger = claim is Claim.TURN or is_oldest or victim.age > sequence.age
        if younger and may_take(victim):
            books.preempt(victim, now)
            if books.memory.num_room >= needed:
                return True
    return False


def make_room_for_load(books: Books, lane: Lane, count: int, now: float, urgent: bool) -> bool:
    """Make `count` pages and a row free for an adapter's weights. `urgent`: it is the ring's
    head, paused sequences give their pages."""
    slots = books.memory.slots
    if slots.num_free and books.memory.num_room >= count:
        return True
    first = oldest_live(books)
    oldest = oldest_runnable(books) if urgent else None
    for_oldest = oldest is not None and oldest.live.digest == lane.digest

    def is_spare(slot: Slot) -> bool:
        waiting = books.lanes.get(slot.digest)
        if waiting is None or not waiting.num_in_ring:
            return True
        return for_oldest or books.num_before(waiting) > books.num_before(lane)

    if not slots.num_free:
        candidates = [s for s in _by_value(books) if is_spare(s)]
        if not candidates:
            return False
        books.evict_slot(candidates[0], now)
    if _evict(books, count, is_spare, lane, now):
        return True
    if not urgent:
        return False

    def may_take(victim: Sequence) -> bool:
        return victim is not first and (for_oldest or victim.has_advanced)

    return _preempt_paused(books, count, may_take, now)


def _is_spare(books: Books, slot: Slot, claim: Claim, is_oldest: bool) -> bool:
    lane = books.lanes.get(slot.digest)
    if lane is None or not lane.num_in_ring:
        return True
    return is_oldest or (claim is not Claim.MODEST and books.num_before(lane) > 0)


def _by_value(books: Books) -> list[Slot]:
    """Idle slots, the least valuable first: nobody waits, longest unused; then the ring's tail.
    Never the one that the oldest sequence waits for."""
    first = oldest_live(books)
    idle = [
        slot
        for slot in books.memory.idle_slots(books.turns.__contains__)
        if first is None or slot.digest != first.live.digest
    ]
    lanes = {slot: books.lanes.get(slot.digest) for slot in idle}
    wanted = {s: books.num_before(lane) for s, lane in lanes.items() if lane and lane.num_in_ring}
    unwanted = [slot for slot in idle if slot not in wanted]
    return unwanted + sorted(wanted, key=lambda slot: -wanted[slot])


def _evict(
    books: Books, count: int, is_spare: Callable[[Slot], bool], lane: Lane, now: float
) -> bool:
    if books.memory.num_room >= count:
        return True
    for slot in _by_value(books):
        if slot.digest != lane.digest and is_spare(slot):
            books.evict_slot(slot, now)
            if books.memory.num_room >= count:
                return True
    return False


def _preempt_paused(
    books: Books, count: int, may_take: Callable[[Sequence], bool], now: float
) -> bool:
    for age in sorted(books.paused, reverse=True):
        if books.memory.num_room >= count:
            return True
        victim = books.paused[age]
        if may_take(victim):
            books.preempt(victim, now)
    return books.memory.num_room >= count


def _running_most_served_first(books: Books) -> list[Sequence]:
    running = [s for turn in books.turns for s in turn.lane.running.values()]
    return sorted(running, key=lambda s: (*s.flow.level, s.age), reverse=True)
