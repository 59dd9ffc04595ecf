"""What runs in a step: every decode, then prompts in chunks within max_num_batched_tokens.

Each flow with a prompt gets a first piece; all else goes by the least virtual counter: of the
classes, of their tenants, of a tenant's flows. Pages are given oldest first, so that whoever loses
pages to an older one has none from this step.
"""

from __future__ import annotations

from engine_svc.core.books import Books
from engine_svc.core.flow import Flow
from engine_svc.core.heads import Heads
from engine_svc.core.pressure import Claim, make_room
from engine_svc.core.sequence import Age, Sequence, SequenceState
from engine_svc.core.start import (
    needs_copy,
    num_pages_lacking,
    take_pages,
    try_start,
)
from engine_svc.core.waits import Cause


def divide_budget(books: Books, now: float) -> list[Sequence]:
    """Tokens for what runs already; returns the sequences of the step, each with its `share`."""
    running: list[Sequence] = []
    prompts: list[Sequence] = []
    needy: list[Sequence] = []
    page_size = books.limits.page_size
    for turn in books.turns:
        for sequence in turn.lane.running.values():
            planned = sequence.num_planned
            # whose seat holds its last token has one token left, unless that was its last
            total = sequence.num_total if sequence.names_tokens else planned + 1
            if total >= sequence.max_total:
                continue
            if total - planned > 1:
                prompts.append(sequence)
                continue
            sequence.share = 1
            running.append(sequence)
            if planned >= len(sequence.page_ids) * page_size or len(sequence.live.sequences) > 1:
                needy.append(sequence)
    if prompts:
        left = books.limits.max_num_batched_tokens - len(running)
        chosen = _divide_among_prompts(prompts, left, books.limits.min_chunk)
        running += chosen
        needy += chosen
    return _give_pages(books, running, needy, now) if needy else running


def _divide_among_prompts(prompts: list[Sequence], left: int, min_chunk: int) -> list[Sequence]:
    prompts.sort(key=_priority)
    firsts: dict[Flow, Sequence] = {}
    for sequence in prompts:
        firsts.setdefault(sequence.flow, sequence)
        sequence.share = 0
    piece = min(min_chunk, left // len(firsts))
    for sequence in firsts.values():
        sequence.share = min(piece, sequence.num_left)
        left -= sequence.share
    for sequence in prompts:
        more = min(left, sequence.num_left - sequence.share)
        left -= more
        sequence.share += more
    return [sequence for sequence in prompts if sequence.share]


def _give_pages(
    books: Books, chosen: list[Sequence], needy: list[Sequence], now: float
) -> list[Sequence]:
    """Pages for all shares; whoever gets none in this step stays as it is."""
    page_size = books.limits.page_size
    needy = [
        sequence
        for sequence in needy
        if sequence.num_planned + sequence.share > len(sequence.page_ids) * page_size
        or (sequence.live.shares_pages and needs_copy(books, sequence))
    ]
    if not needy:
        return chosen
    needy.sort(key=lambda sequence: sequence.age)
    for sequence in needy:
        if sequence.state is SequenceState.RUNNING:
            _fit_to_room(books, sequence, now)
    return [s for s in chosen if s.share and s.state is SequenceState.RUNNING]


def _fit_to_room(books: Books, sequence: Sequence, now: float) -> None:
    """Pages for one share, which shrinks to what there is room for."""
    needed = num_pages_lacking(books, sequence, sequence.share)
    if not make_room(books, needed, sequence, Claim.RUNNING, now):
        copied = needs_copy(books, sequence)
        if copied and not books.memory.num_room:
            sequence.share = 0
            return
        num_pages = len(sequence.page_ids) + books.memory.num_room - copied
        room = num_pages * books.limits.page_size - sequence.num_planned
        sequence.share = min(sequence.share, max(0, room))
    take_pages(books, sequence, sequence.share)


def _priority(sequence: Sequence) -> tuple[float, float, float, Age]:
    return *sequence.flow.level, sequence.age


def has_budget(books: Books, sequence: Sequence) -> bool:
    """A step has tokens for a first chunk beside what runs and the other flows' prompts."""
    limits = books.limits
    left = limits.max_num_batched_tokens - (limits.max_num_seqs - len(books.free_seats))
    prefilling = {
        s.flow for turn in books.turns for s in turn.lane.running.values() if s.num_left > 1
    }
    return left - len(prefilling) * limits.min_chunk >= min(limits.min_chunk, sequence.num_left)


def start_waiting(books: Books, chosen: list[Sequence], now: float) -> list[Sequence]:
    """Seats, pages and tokens that are left go to those who wait in adapters that hold a place;
    the first that cannot start stops the round."""
    if books.lacking is not None:
        _blame(books, books.lacking, now)
        return []
    heads = Heads(books)
    left = books.limits.max_num_batched_tokens - sum(sequence.share for sequence in chosen)
    started: list[Sequence] = []
    lacking: Cause | None = None
    while (sequence := heads.first()) is not None:
        if left <= 0:
            lacking = Cause.BUDGET
        else:
            lacking = try_start(books, sequence, Claim.MODEST, left, now)
        if lacking is not None:
            break
        sequence.share = min(left, sequence.num_left)
        started.append(sequence)
        left -= sequence.share
        books.charge(sequence, sequence.num_planned + sequence.share)
    heads.put_back()
    if lacking is not None:
        _blame(books, lacking, now)
    return started


def _blame(books: Books, cause: Cause, now: float) -> None:
    """What waits in open turns waits for what the first of them lacks."""
    for turn in books.turns:
        if turn.closing_since is None and turn.lane.num_deferred:
            turn.lane.blame(cause, now)
