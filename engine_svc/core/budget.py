"""What runs in a step: every decode, then prompts in chunks within max_num_batched_tokens.

Each adapter with a prompt gets a first piece, the least served first; the rest goes to the oldest.
Pages are given oldest first, so that whoever loses pages to an older one has none from this step.
"""

from __future__ import annotations

import heapq

from engine_svc.core.books import Books
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
    prompts: list[list[Sequence]] = []
    for turn in sorted(books.turns, key=lambda turn: turn.service):
        prefilling = []
        for sequence in turn.lane.running.values():
            total = sequence.num_total
            if total >= sequence.max_total:
                continue
            if total - sequence.num_planned == 1:
                sequence.share = 1
                running.append(sequence)
            else:
                prefilling.append(sequence)
        if prefilling:
            prompts.append(sorted(prefilling, key=lambda s: s.age))
    if prompts:
        left = books.limits.max_num_batched_tokens - len(running)
        running += _divide_among_prompts(prompts, left, books.limits.min_chunk)
    return _give_pages(books, running, now)


def _divide_among_prompts(
    prompts: list[list[Sequence]], left: int, min_chunk: int
) -> list[Sequence]:
    piece = min(min_chunk, left // len(prompts))
    firsts = {lane[0]: min(piece, lane[0].num_left) for lane in prompts}
    left -= sum(firsts.values())
    chosen = []
    for sequence in sorted((s for lane in prompts for s in lane), key=lambda s: s.age):
        first = firsts.get(sequence, 0)
        more = min(left, sequence.num_left - first)
        left -= more
        sequence.share = first + more
        if sequence.share:
            chosen.append(sequence)
    return chosen


def _give_pages(books: Books, chosen: list[Sequence], now: float) -> list[Sequence]:
    """Pages for all shares; whoever gets none in this step stays as it is."""
    page_size = books.limits.page_size
    needy = [
        sequence
        for sequence in chosen
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


def start_waiting(books: Books, chosen: list[Sequence], now: float) -> list[Sequence]:
    """Seats, pages and tokens that are left go to those who wait in adapters that hold a place,
    in the order of their arrival; the first that cannot start stops the round."""
    left = books.limits.max_num_batched_tokens - sum(sequence.share for sequence in chosen)
    open_lanes: list[tuple[Age, str]] = []
    for turn in books.turns:
        first = turn.lane.first()
        if first is not None and turn.closing_since is None and not first.in_flight:
            heapq.heappush(open_lanes, (first.age, turn.lane.digest))
    started: list[Sequence] = []
    lacking = books.lacking
    while open_lanes and lacking is None:
        lane = books.lanes[open_lanes[0][1]]
        sequence = lane.first()
        assert sequence is not None
        if left <= 0:
            lacking = Cause.BUDGET
        else:
            lacking = try_start(books, sequence, Claim.MODEST, left, now)
        if lacking is not None:
            break
        sequence.share = min(left, sequence.num_left)
        started.append(sequence)
        left -= sequence.share
        heapq.heappop(open_lanes)
        following = lane.first()
        if following is not None and not following.in_flight:
            heapq.heappush(open_lanes, (following.age, lane.digest))
    for _, digest in open_lanes:
        books.lanes[digest].blame(lacking or Cause.BUDGET, now)
    return started
