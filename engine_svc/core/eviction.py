"""Which idle slot is given up: first what nobody in the ring waits for, longest unused; then what
is farthest from its turn. The oldest sequence's adapter comes last, and only where rows are short.

Ranking every idle slot costs as much as it has neighbours in the ring, so one ranking serves many
evictions: the farther half of it, farthest first. What has become a near one meanwhile is spared
by the caller, who names the adapters ahead in the ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import islice

from engine_svc.core.books import Books
from engine_svc.core.lines import RING
from engine_svc.core.sequence import Sequence, SequenceState
from engine_svc.core.slots import Slot

#: flows of an adapter that are asked how near their turn is
_ASKED_FLOWS = 8


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


def evict_slots(
    books: Books, count: int, spared: Set[str], now: float, wanted_too: bool = True
) -> bool:
    """Give up idle slots until `count` pages are free; False: too few can be."""
    while books.memory.num_room < count:
        if not evict_slot(books, spared, now, wanted_too):
            return False
    return True


def evict_slot(books: Books, spared: Set[str], now: float, wanted_too: bool = True) -> bool:
    """Give up the least valuable idle slot; `wanted_too`: also of an adapter in the ring."""
    return _evict(books, spared, _oldest_digest(books), now, wanted_too)


def evict_row(books: Books, spared: Set[str], now: float) -> bool:
    """The same where rows are short: the oldest's slot too, if others have pages to run on, so that
    it reserves no row for an adapter with a long backlog."""
    if evict_slot(books, spared, now):
        return True
    has_pages = books.memory.num_room > 0 or len(books.paused.ages()) > 1
    return has_pages and _evict(books, spared, books.rescued, now, True)


def _oldest_digest(books: Books) -> str | None:
    first = oldest_live(books)
    return None if first is None else first.live.digest


def _evict(books: Books, spared: Set[str], kept: str | None, now: float, wanted_too: bool) -> bool:
    slots = books.memory.slots
    slot = next((s for d, s in slots.unwanted.items() if d != kept and d not in spared), None)
    if slot is None and wanted_too:
        slot = _farthest(books, spared, kept)
    if slot is None:
        return False
    books.evict_slot(slot, now)
    return True


def _farthest(books: Books, spared: Set[str], kept: str | None) -> Slot | None:
    wanted, far = books.memory.slots.wanted, books.far_slots
    while far:
        slot = far.pop()
        digest = slot.digest
        if wanted.get(digest) is slot and digest != kept and digest not in spared:
            return slot
    spare = [s for d, s in wanted.items() if d != kept and d not in spared]
    if not spare:
        return None
    spare.sort(key=lambda slot: _num_before(books, slot))
    far += spare[len(spare) // 2 :]
    return far.pop()


def _num_before(books: Books, slot: Slot) -> int:
    """Grants before the next one to the slot's adapter."""
    flows = (f for f in books.lanes[slot.digest].flows.values() if f.line == RING)
    return min(books.ring.num_before(flow) for flow in islice(flows, _ASKED_FLOWS))
