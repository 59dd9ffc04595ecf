"""A draft becomes a StepPlan; from here on its sequences are as if the step had run."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import itemgetter

from engine_svc.core.books import Books
from engine_svc.core.draft import Draft
from engine_svc.core.lane import Lane
from engine_svc.core.sequence import Sequence
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
    SeatOpening,
    SlotBinding,
    StepPlan,
)

#: What commit needs of a sequence of which the step may fill a page: its incarnation, and the end
#: of the positions that are written then, unless it is in a later incarnation by then.
Row = tuple[Sequence, int, int]


@dataclass(slots=True)
class LaunchedStep:
    """A plan, and what its commit needs."""

    plan: StepPlan
    rows: list[Row]
    #: who has each seat
    by_seat: list[Sequence | None]
    num_samples: int


@dataclass(slots=True)
class _Parts:
    rows: list[Row] = field(default_factory=list)
    bindings: list[SlotBinding] = field(default_factory=list)
    num_samples: int = 0
    #: prompts whose last chunk is in the plan
    complete: list[Sequence] = field(default_factory=list)


def build_step(books: Books, draft: Draft, run_ahead: int, now: float) -> LaunchedStep:
    """Rows grouped by slot, the base last."""
    step, parts = books.next_step, _Parts()
    chunks = _rows(books, draft, parts, now)
    openings = [o for sequence in books.opened if sequence.seats for o in _openings(sequence)]
    _end_decodes(books, draft, parts)
    for sequence in parts.complete:
        _begin_decodes(books, sequence)
    plan = StepPlan(
        step=step,
        chunks=chunks,
        seat_openings=tuple(openings),
        slot_bindings=tuple(parts.bindings),
        page_copies=tuple(c for s, c in books.page_copies if s.page_copy is c),
        run_ahead=run_ahead,
    )
    for sequence, _ in books.page_copies:
        sequence.page_copy = None
    books.next_step += 1
    books.alarms.pop(step, None)
    books.rates.step_planned(now, books.charges.step_service)
    books.memory.launched(step, [copy.source for copy in plan.page_copies])
    by_seat = books.seated.copy()
    return LaunchedStep(plan, parts.rows, by_seat, parts.num_samples)


def _rows(books: Books, draft: Draft, parts: _Parts, now: float) -> Chunks:
    """Everything that decodes, and the prompts beside what decodes of their adapters."""
    prompts: dict[Lane, list[Sequence]] = {}
    for sequence in draft.prompts:
        prompts.setdefault(sequence.lane, []).append(sequence)
    parts.num_samples = len(books.decodes)
    books.charges.decodes()
    #: row that it goes before, whether it is the base's, chunk
    chunks: list[tuple[int, bool, Chunk]] = []
    for lane, sequences in prompts.items():
        turn = books.turns.get(lane.digest)
        assert turn is not None, "a prompt without a turn"
        slot, row = turn.slot, books.decodes.row_after(lane)
        if slot is not None and not slot.bound:
            slot.bound = True
            parts.bindings.append(SlotBinding(slot.index, lane.digest, slot.page_ids))
        index = NO_SLOT if slot is None else slot.index
        for sequence in sequences:
            chunk = _add_prompt(books, parts, sequence, index, now)
            chunks.append((row, lane.is_base, chunk))
    chunks.sort(key=itemgetter(0, 1))
    return books.decodes.chunks([(row, chunk) for row, _, chunk in chunks])


def _add_prompt(books: Books, parts: _Parts, sequence: Sequence, slot: int, now: float) -> Chunk:
    """A chunk that names its tokens."""
    start = sequence.num_planned
    end = start + sequence.share
    if sequence.live.waits is None:
        books.first_planned(sequence.live, now)
    books.charges.chunk(sequence, end)
    is_last = end == sequence.num_total
    top, following = _prompt_logprobs(sequence, end)
    chunk = Chunk(
        sequence.seats[0],
        slot,
        start,
        sequence.share,
        sequence.token_ids(start, end),
        tuple(sequence.page_ids[: -(-end // books.limits.page_size)]),
        sequence.seats if is_last else (),
        top,
        following,
    )
    sequence.num_planned = end
    sequence.last_step = books.next_step
    parts.rows.append((sequence, sequence.incarnation, end))
    parts.num_samples += len(chunk.sample_seats)
    if is_last:
        parts.complete.append(sequence)
    return chunk


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


def _end_decodes(books: Books, draft: Draft, parts: _Parts) -> None:
    """Full pages and last tokens of those that decode in the plan after all: one that lost its
    pages since may even be in it with a prompt again."""
    for sequence in draft.filling:
        if sequence.decodes is not None:
            parts.rows.append((sequence, sequence.incarnation, sequence.num_planned))
    for sequence in draft.ending:
        if sequence.decodes is not None:
            sequence.lane.stop_decoding(sequence)
    for sequence in draft.skipped:
        books.look_at(sequence, books.next_step + 1)


def _begin_decodes(books: Books, sequence: Sequence) -> None:
    """Its prompt's last chunk is in the plan: every choice has a token in flight."""
    sequence.lane.decode(sequence)
    live = sequence.live
    for one in (sequence,) if live.forked else books.fork(sequence):
        if not one.exhausted:
            books.look_at(one, books.next_step + 1)
