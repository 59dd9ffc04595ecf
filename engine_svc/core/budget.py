"""What runs in a step: every decode, then prompts in chunks within max_num_batched_tokens.

Each flow with a prompt gets a first piece; all else goes by the least virtual counter: of the
classes, of their tenants, of a tenant's flows. Pages are given oldest first, so that whoever loses
pages to an older one has none from this step.
"""

from __future__ import annotations

from engine_svc.core.books import Books
from engine_svc.core.draft import Draft
from engine_svc.core.flow import Flow
from engine_svc.core.pressure import Claim, make_room
from engine_svc.core.sequence import Age, Sequence, SequenceState
from engine_svc.core.start import (
    needs_copy,
    num_pages_lacking,
    take_pages,
    try_start,
)
from engine_svc.core.waits import Cause
from engine_svc.types import NO_SLOT


def divide_budget(books: Books, now: float) -> Draft:
    """Tokens and pages for what runs already."""
    draft, step = Draft(), books.next_step
    noisy = [
        sequence
        for sequence in dict.fromkeys(books.alarms.get(step, ()))
        if sequence.alarm_step == step and not sequence.names_tokens
    ]
    if books.prompts:
        singles = [sequence for sequence in books.prompts if sequence.num_left == 1]
        for sequence in singles:
            sequence.share = 1
        left = books.limits.max_num_batched_tokens - books.num_decoding - len(singles)
        prompts = [sequence for sequence in books.prompts if sequence.num_left > 1]
        draft.prompts = singles
        if prompts:
            draft.prompts += _divide_among_prompts(books, prompts, left)
    if noisy or draft.prompts:
        _give_pages(books, draft, noisy, now)
    draft.num_decodes = len(books.decodes)
    return draft


def _give_pages(books: Books, draft: Draft, noisy: list[Sequence], now: float) -> None:
    """To prompts, and to decodes that may have filled their last page."""
    room = books.memory.num_room - len(noisy)
    if room >= 0 and _gave_pages(books, draft.prompts, room):
        for sequence in noisy:
            _turn_page(books, draft, sequence)
        return
    needy = [sequence for sequence in noisy if _needs_page(books, draft, sequence)]
    _divide_pages(books, draft, needy + draft.prompts, now)


def _turn_page(books: Books, draft: Draft, sequence: Sequence) -> None:
    """What is special about a decode, where there is room for a page: the page before it is full,
    or shared, or it is the last."""
    start, pages = sequence.num_planned, sequence.page_ids
    if start >= len(pages) * books.limits.page_size:
        draft.filling.append(sequence)
        pages.append(books.memory.take())
    elif len(sequence.live.sequences) > 1:
        take_pages(books, sequence, 1)
    _look_later(books, draft, sequence, start)


def _needs_page(books: Books, draft: Draft, sequence: Sequence) -> bool:
    """The same where there may be none."""
    start = sequence.num_planned
    needs_page = start >= len(sequence.page_ids) * books.limits.page_size
    if needs_page:
        draft.filling.append(sequence)
    if needs_page or (sequence.live.shares_pages and needs_copy(books, sequence)):
        sequence.share = 1
        return True
    _look_later(books, draft, sequence, start)
    return False


def _look_later(books: Books, draft: Draft, sequence: Sequence, start: int) -> None:
    """It has the page of its next position: the next look is when that is full, or at its end."""
    pages, last = sequence.page_ids, sequence.max_total - 2
    books.decodes.turn_page(sequence)
    if sequence.decodes is None:
        turn = books.turns.get(sequence.lane.digest)
        assert turn is not None, "a decode without a turn"
        books.decodes.join(sequence, NO_SLOT if turn.slot is None else turn.slot.index)
    if start >= last:
        draft.ending.append(sequence)
        return
    until = len(pages) * books.limits.page_size
    step = books.next_step - start + (until if until < last else last)
    sequence.alarm_step = step
    books.alarms[step].append(sequence)


def _divide_among_prompts(books: Books, prompts: list[Sequence], left: int) -> list[Sequence]:
    prompts.sort(key=_priority)
    claims = _claims(books) if sum(s.num_left for s in prompts) > left else []
    firsts: dict[Flow, Sequence] = {}
    for sequence in prompts:
        firsts.setdefault(sequence.flow, sequence)
        sequence.share = 0
    piece = min(books.limits.min_chunk, left // len(firsts))
    for sequence in firsts.values():
        sequence.share = min(piece, sequence.num_left)
        left -= sequence.share
    for sequence in prompts:
        level = sequence.flow.level
        claimed = sum(tokens for behind, tokens in claims if behind < level)
        more = min(max(0, left - claimed), sequence.num_left - sequence.share)
        left -= more
        sequence.share += more
    return [sequence for sequence in prompts if sequence.share]


def _claims(books: Books) -> list[tuple[tuple[float, float, float], int]]:
    """Tokens that those who could start in this step have a right to before the prompts of flows
    that had more: of each flow in an open turn the first, by its counters."""
    if books.lacking is not None or not books.free_seats:
        return []
    claims = []
    for turn in books.turns.values():
        if turn.closing_since is not None or not turn.lane.num_deferred:
            continue
        for flow in turn.lane.flows.values():
            first = flow.first()
            if first is None or books.in_flight(first):
                continue
            has_room = num_pages_lacking(books, first, first.num_left) <= books.memory.num_room
            if has_room and first.num_seats_needed <= len(books.free_seats):
                claims.append((flow.level, first.num_left))
    return claims


def _gave_pages(books: Books, prompts: list[Sequence], room: int) -> bool:
    """Pages for all shares, if so many are free and none is shared."""
    page_size, total = books.limits.page_size, 0
    lacking: list[tuple[Sequence, int]] = []
    for sequence in prompts:
        if len(sequence.live.sequences) > 1:
            return False
        end = sequence.num_planned + sequence.share
        count = -(-end // page_size) - len(sequence.page_ids)
        if count > 0:
            lacking.append((sequence, count))
            total += count
    if total > room:
        return False
    pages = books.memory.take_many(total)
    for sequence, count in lacking:
        sequence.page_ids += [pages.pop() for _ in range(count)]
    return True


def _divide_pages(books: Books, draft: Draft, needy: list[Sequence], now: float) -> None:
    """Pages for all shares, oldest first; whoever gets none in this step stays as it is."""
    page_size = books.limits.page_size
    needy = [
        sequence
        for sequence in needy
        if sequence.num_planned + sequence.share > len(sequence.page_ids) * page_size
        or (sequence.live.shares_pages and needs_copy(books, sequence))
    ]
    needy.sort(key=_age)
    for sequence in needy:
        if sequence.state is SequenceState.RUNNING:
            _fit_to_room(books, sequence, now)
            if sequence.share and not sequence.names_tokens:
                _look_later(books, draft, sequence, sequence.num_planned)
    draft.skipped = {
        s for s in needy if not (s.share or s.names_tokens) and s.state is SequenceState.RUNNING
    }
    for sequence in draft.skipped:
        books.decodes.leave(sequence)
    draft.prompts = [s for s in draft.prompts if s.share and s.state is SequenceState.RUNNING]


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


def _age(sequence: Sequence) -> Age:
    return sequence.age


def _priority(sequence: Sequence) -> tuple[float, float, float, Age]:
    return *sequence.flow.level, sequence.age


def has_budget(books: Books, sequence: Sequence) -> bool:
    """A step has tokens for a first chunk beside what decodes and the other flows' first pieces."""
    min_chunk = books.limits.min_chunk
    left = books.limits.max_num_batched_tokens - books.num_decoding
    pieces: dict[Flow, int] = {}
    for prompt in books.prompts:
        if prompt.num_left == 1:
            left -= 1
        else:
            pieces[prompt.flow] = pieces.get(prompt.flow, 0) + prompt.num_left
    left -= sum(min(min_chunk, tokens) for tokens in pieces.values())
    return left >= min(min_chunk, sequence.num_left)


def start_waiting(books: Books, draft: Draft, now: float) -> None:
    """Seats, pages and tokens that are left go to those who wait in adapters that hold a place;
    the first that cannot start stops the round."""
    if books.lacking is not None:
        draft.lacking = books.lacking
        _blame(books, books.lacking, now)
        return
    heads = books.heads
    left = books.limits.max_num_batched_tokens - draft.num_tokens
    lacking: Cause | None = None
    while (sequence := heads.first(books.turns, books.in_flight)) is not None:
        if left <= 0:
            lacking = Cause.BUDGET
        else:
            lacking = try_start(books, sequence, Claim.MODEST, left, now)
        if lacking is not None:
            break
        sequence.share = min(left, sequence.num_left)
        draft.prompts.append(sequence)
        left -= sequence.share
        books.charges.chunk(sequence, sequence.num_planned + sequence.share)
    heads.put_back()
    draft.lacking = lacking
    if lacking is not None:
        _blame(books, lacking, now)


def _blame(books: Books, cause: Cause, now: float) -> None:
    """What waits in open turns waits for what the first of them lacks."""
    for turn in books.turns.values():
        if turn.closing_since is None and turn.lane.num_deferred:
            turn.lane.blame(cause, now)
