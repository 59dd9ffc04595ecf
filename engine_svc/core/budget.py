"""What runs in a step: every decode, then prompts in chunks within max_num_batched_tokens.

Each adapter with a prompt gets a first piece, the least served first; the rest goes to the oldest.
Pages are given oldest first, so that whoever loses pages to an older one has none from this step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

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


@dataclass(slots=True)
class Share:
    """Tokens of one sequence in the step."""

    sequence: Sequence
    num_tokens: int


def divide_budget(books: Books, now: float) -> list[Share]:
    """Tokens for what runs already."""
    shares: list[Share] = []
    prompts: list[list[Sequence]] = []
    for turn in sorted(books.turns, key=lambda turn: turn.service):
        prefilling = []
        for sequence in turn.lane.running.values():
            if sequence.exhausted:
                continue
            if sequence.num_left == 1:
                shares.append(Share(sequence, 1))
            else:
                prefilling.append(sequence)
        if prefilling:
            prompts.append(sorted(prefilling, key=lambda s: s.age))
    left = books.limits.max_num_batched_tokens - len(shares)
    if prompts:
        shares += _divide_among_prompts(prompts, left, books.limits.min_chunk)
    return _give_pages(books, shares, now)


def _divide_among_prompts(prompts: list[list[Sequence]], left: int, min_chunk: int) -> list[Share]:
    piece = min(min_chunk, left // len(prompts))
    firsts = {lane[0]: min(piece, lane[0].num_left) for lane in prompts}
    left -= sum(firsts.values())
    shares = []
    for sequence in sorted((s for lane in prompts for s in lane), key=lambda s: s.age):
        first = firsts.get(sequence, 0)
        more = min(left, sequence.num_left - first)
        left -= more
        if first + more:
            shares.append(Share(sequence, first + more))
    return shares


def _give_pages(books: Books, shares: list[Share], now: float) -> list[Share]:
    """Pages for all shares; whoever gets none in this step stays as it is."""
    needy = [
        share for share in shares if num_pages_lacking(books, share.sequence, share.num_tokens)
    ]
    if not needy:
        return shares
    needy.sort(key=lambda share: share.sequence.age)
    for share in needy:
        if share.sequence.state is SequenceState.RUNNING:
            _fit_to_room(books, share, now)
    return [s for s in shares if s.num_tokens and s.sequence.state is SequenceState.RUNNING]


def _fit_to_room(books: Books, share: Share, now: float) -> None:
    """Pages for one share, which shrinks to what there is room for."""
    sequence, page_size = share.sequence, books.limits.page_size
    needed = num_pages_lacking(books, sequence, share.num_tokens)
    if not make_room(books, needed, sequence, Claim.RUNNING, now):
        if needs_copy(books, sequence) and not books.memory.num_room:
            share.num_tokens = 0
            return
        owned = len(sequence.page_ids) + books.memory.num_room - needs_copy(books, sequence)
        share.num_tokens = max(0, owned * page_size - sequence.num_planned)
    take_pages(books, sequence, share.num_tokens)


def start_waiting(books: Books, shares: list[Share], now: float) -> list[Share]:
    """Seats, pages and tokens that are left go to those who wait in adapters that hold a place,
    in the order of their arrival; the first that cannot start stops the round."""
    left = books.limits.max_num_batched_tokens - sum(share.num_tokens for share in shares)
    open_lanes: list[tuple[Age, str]] = []
    for turn in books.turns:
        first = turn.lane.first()
        if first is not None and turn.closing_since is None and not first.in_flight:
            heapq.heappush(open_lanes, (first.age, turn.lane.digest))
    started: list[Share] = []
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
        share = Share(sequence, min(left, sequence.num_left))
        started.append(share)
        left -= share.num_tokens
        heapq.heappop(open_lanes)
        following = lane.first()
        if following is not None and not following.in_flight:
            heapq.heappush(open_lanes, (following.age, lane.digest))
    for _, digest in open_lanes:
        books.lanes[digest].blame(lacking or Cause.BUDGET, now)
    return started
