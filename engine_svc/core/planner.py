"""Plan a step: turns, places, tokens and pages become one StepPlan."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_svc.core.books import Books
from engine_svc.core.budget import divide_budget, start_waiting
from engine_svc.core.flow import Flow
from engine_svc.core.lane import Lane
from engine_svc.core.loads import Loads
from engine_svc.core.places import (
    begin_turn,
    close_turns,
    end_unused_turns,
    grant_places,
    is_ready,
)
from engine_svc.core.pressure import Claim, oldest_runnable
from engine_svc.core.sequence import Sequence
from engine_svc.core.start import try_start
from engine_svc.types import (
    NO_SLOT,
    Chunk,
    SeatOpening,
    SlotBinding,
    StepPlan,
)

#: What commit needs of a chunk: the sequence, its incarnation, and the end of the positions that
#: are written when the step has run, unless the sequence is in a later incarnation by then.
Row = tuple[Sequence, int, int]


@dataclass(slots=True)
class LaunchedStep:
    """A plan and who is behind its chunks and seats."""

    plan: StepPlan
    rows: list[Row]
    by_seat: dict[int, Sequence]
    #: tokens of each adapter in the step
    segments: tuple[int, ...] = ()


@dataclass(slots=True)
class _Draft:
    chunks: list[Chunk] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    by_seat: dict[int, Sequence] = field(default_factory=dict)
    bindings: list[SlotBinding] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)


def plan_step(books: Books, loads: Loads, now: float, num_in_flight: int) -> LaunchedStep | None:
    """Form the next step, or None when nothing can run."""
    books.page_copies.clear()
    books.opened.clear()
    books.step_service = 0.0
    close_turns(books, now)
    loads.advance(now)
    grant_places(books, now)
    chosen = _choose(books, now)
    if not chosen and not num_in_flight and books.requests:
        _unlock(books, loads, now)
        chosen = _choose(books, now)
    by_lane = _group(chosen)
    end_unused_turns(books, by_lane, now)
    if not chosen:
        books.rates.nothing_planned()
        return None
    return _build(books, by_lane, num_in_flight, now)


def _choose(books: Books, now: float) -> list[Sequence]:
    chosen = divide_budget(books, now)
    return chosen + start_waiting(books, chosen, now)


def _unlock(books: Books, loads: Loads, now: float) -> None:
    """Everybody lacks what others keep: the oldest takes what it needs, so that it ends. While its
    adapter is on its way, the ring goes on with all places and seats free."""
    for turn in books.turns:
        books.end_turn(turn, now)
    oldest = oldest_runnable(books)
    if oldest is None:
        return
    lane = oldest.lane
    if not is_ready(books, lane):
        loads.try_fill_now(lane, now)
        grant_places(books, now)
    elif try_start(books, oldest, Claim.TURN, books.limits.min_chunk, now, True) is None:
        begin_turn(books, oldest.flow, now)


def _group(chosen: list[Sequence]) -> dict[Lane, list[Sequence]]:
    by_lane: dict[Lane, list[Sequence]] = {}
    for sequence in chosen:
        group = by_lane.get(sequence.lane)
        if group is None:
            group = by_lane[sequence.lane] = []
        group.append(sequence)
    return by_lane


def _build(
    books: Books, by_lane: dict[Lane, list[Sequence]], run_ahead: int, now: float
) -> LaunchedStep:
    """Rows grouped by slot, the base last; from here on the sequences are as if it had run."""
    base: list[Sequence] = []
    draft = _Draft()
    for lane, group in by_lane.items():
        if lane.is_base:
            base = group
            continue
        slot = books.memory.slots.ready(lane.digest)
        assert slot is not None, f"{lane.digest} holds a place without a slot"
        if not slot.bound:
            slot.bound = True
            draft.bindings.append(SlotBinding(slot.index, lane.digest, slot.page_ids))
        _add_segment(books, draft, group, slot.index, now)
    if base:
        _add_segment(books, draft, base, NO_SLOT, now)
    openings = [o for sequence in books.opened if sequence.seats for o in _openings(sequence)]
    _fork_prompts(books, draft)
    plan = StepPlan(
        step=books.next_step,
        chunks=tuple(draft.chunks),
        seat_openings=tuple(openings),
        slot_bindings=tuple(draft.bindings),
        page_copies=tuple(c for s, c in books.page_copies if s.page_copy is c),
        run_ahead=run_ahead,
    )
    assert plan.num_adapters <= books.limits.max_loras, "more adapters in a step than max_loras"
    for sequence, _ in books.page_copies:
        sequence.page_copy = None
    books.next_step += 1
    books.rates.step_planned(now, books.step_service)
    books.memory.launched(plan.step, [copy.source for copy in plan.page_copies])
    return LaunchedStep(plan, draft.rows, draft.by_seat, tuple(draft.segments))


def _add_segment(books: Books, draft: _Draft, group: list[Sequence], slot: int, now: float) -> None:
    page_size, num_tokens = books.limits.page_size, 0
    decodes: dict[Flow, int] = {}
    for sequence in group:
        end = sequence.num_planned + sequence.share
        num_tokens += sequence.share
        if sequence.names_tokens:
            if sequence.live.waits is None:
                books.first_planned(sequence.live, now)
            if end > sequence.num_charged:
                books.charge(sequence, end)
        elif end > sequence.num_charged:
            sequence.num_charged = end
            flow = sequence.flow
            decodes[flow] = decodes.get(flow, 0) + 1
        chunk = _chunk(sequence, slot, page_size)
        sequence.num_planned = end
        sequence.in_flight += 1
        draft.chunks.append(chunk)
        draft.rows.append((sequence, sequence.incarnation, end))
        if chunk.sample_seats:
            sequence.num_pending += 1
            sequence.names_tokens = False
            draft.by_seat[chunk.seat] = sequence
    for flow, count in decodes.items():
        books.charge_flow(flow, count * books.limits.decode_price)
    draft.segments.append(num_tokens)


def _chunk(sequence: Sequence, slot: int, page_size: int) -> Chunk:
    start, seats = sequence.num_planned, sequence.seats
    end = start + sequence.share
    pages = sequence.page_tuple
    if pages is None:
        pages = sequence.page_tuple = tuple(sequence.page_ids)
    num_pages = -(-end // page_size)
    if num_pages != len(pages):
        pages = pages[:num_pages]
    if not sequence.names_tokens:
        return Chunk(seats[0], slot, start, 1, (), pages, seats)
    samples = end == sequence.num_total
    top, following = _prompt_logprobs(sequence, end)
    return Chunk(
        seat=seats[0],
        slot=slot,
        start=start,
        num_tokens=sequence.share,
        token_ids=sequence.token_ids(start, end),
        page_ids=pages,
        sample_seats=seats if samples else (),
        prompt_logprobs=top,
        next_prompt_token=following,
    )


def _prompt_logprobs(sequence: Sequence, end: int) -> tuple[int | None, int]:
    """Whether this chunk brings log probabilities that the request does not have yet."""
    live = sequence.live
    top, prompt = live.request.sampling.prompt_logprobs, live.request.prompt_token_ids
    if top is None or live.forked or end <= len(live.prompt_logprobs):
        return None, -1
    return top, prompt[end] if end < len(prompt) else -1


def _openings(sequence: Sequence) -> list[SeatOpening]:
    request = sequence.live.request
    choices = [sequence.choice] if sequence.live.forked else list(range(len(sequence.seats)))
    return [
        SeatOpening(
            seat,
            request.sampling,
            choice,
            request.prompt_token_ids,
            tuple(sequence.output_ids),
        )
        for seat, choice in zip(sequence.seats, choices, strict=True)
    ]


def _fork_prompts(books: Books, draft: _Draft) -> None:
    """Prompts whose last chunk is in the plan: every choice samples from it."""
    for lead, _, _ in list(draft.rows):
        if lead.live.forked or not lead.num_pending:
            continue
        for sequence in books.fork(lead)[1:]:
            sequence.num_pending = sequence.in_flight = 1
            sequence.names_tokens = False
            draft.rows.append((sequence, sequence.incarnation, sequence.num_planned))
            draft.by_seat[sequence.seats[0]] = sequence
