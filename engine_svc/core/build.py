"""A draft becomes a StepPlan; from here on its sequences are as if the step had run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine_svc.core.books import Books
from engine_svc.core.draft import Draft
from engine_svc.core.flow import Flow
from engine_svc.core.lane import Lane
from engine_svc.core.sequence import Sequence
from engine_svc.core.turns import Turn
from engine_svc.types import (
    NO_SLOT,
    Chunk,
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
    #: tokens of each adapter in the step
    segments: tuple[int, ...]


@dataclass(slots=True)
class _Parts:
    chunks: list[Chunk] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    bindings: list[SlotBinding] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    num_samples: int = 0
    #: prompts whose last chunk is in the plan
    complete: list[Sequence] = field(default_factory=list)


def build_step(books: Books, draft: Draft, run_ahead: int, now: float) -> LaunchedStep:
    """Rows grouped by slot, the base last."""
    step, parts = books.next_step, _Parts()
    _add_rows(books, draft, parts, now)
    openings = [o for sequence in books.opened if sequence.seats for o in _openings(sequence)]
    _end_decodes(books, draft, parts)
    for sequence in parts.complete:
        _begin_decodes(books, sequence)
    plan = StepPlan(
        step=step,
        chunks=tuple(parts.chunks),
        seat_openings=tuple(openings),
        slot_bindings=tuple(parts.bindings),
        page_copies=tuple(c for s, c in books.page_copies if s.page_copy is c),
        run_ahead=run_ahead,
    )
    for sequence, _ in books.page_copies:
        sequence.page_copy = None
    books.next_step += 1
    books.alarms.pop(step, None)
    books.rates.step_planned(now, books.step_service)
    books.memory.launched(step, [copy.source for copy in plan.page_copies])
    by_seat = books.seated.copy()
    return LaunchedStep(plan, parts.rows, by_seat, parts.num_samples, tuple(parts.segments))


def _add_rows(books: Books, draft: Draft, parts: _Parts, now: float) -> None:
    """The hot loop of planning: a row for each decode."""
    prompts: dict[Lane, list[Sequence]] = {}
    for sequence in draft.prompts:
        prompts.setdefault(sequence.lane, []).append(sequence)
    step, add, new = books.next_step, parts.chunks.append, tuple.__new__
    counts: list[tuple[Turn, Flow, int]] = []
    num_adapters = 0
    for turn in books.turns.base_last():
        lane = turn.lane
        decodes = lane.decoding if not draft.skipped else draft.decodes_of(lane)
        if not decodes and lane not in prompts:
            continue
        slot, index = turn.slot, NO_SLOT
        if slot is not None:
            index = slot.index
            num_adapters += 1
            if not slot.bound:
                slot.bound = True
                parts.bindings.append(SlotBinding(index, lane.digest, slot.page_ids))
        for sequence in decodes:
            start, seats = sequence.num_planned, sequence.seats
            sequence.num_planned = start + 1
            sequence.last_step = step
            row = (seats[0], index, start, 1, (), sequence.page_tuple, seats, None, -1)
            add(new(Chunk, row))
        num_tokens = len(decodes)
        if num_tokens and len(lane.flows) == 1:
            counts.append((turn, sequence.flow, num_tokens))
        elif num_tokens:
            flows = Counter(sequence.flow for sequence in decodes)
            counts += ((turn, flow, count) for flow, count in flows.items())
        parts.num_samples += num_tokens
        if lane in prompts:
            for sequence in prompts[lane]:
                _add_prompt(books, parts, sequence, index, now)
                num_tokens += sequence.share
        parts.segments.append(num_tokens)
    assert num_adapters <= books.limits.max_loras, "more adapters in a step than max_loras"
    books.charge_decodes(counts)


def _add_prompt(books: Books, parts: _Parts, sequence: Sequence, slot: int, now: float) -> None:
    """A chunk that names its tokens."""
    start = sequence.num_planned
    end = start + sequence.share
    if sequence.live.waits is None:
        books.first_planned(sequence.live, now)
    books.charge(sequence, end)
    if sequence.page_tuple is None:
        sequence.page_tuple = tuple(sequence.page_ids)
    is_last = end == sequence.num_total
    top, following = _prompt_logprobs(sequence, end)
    chunk = Chunk(
        seat=sequence.seats[0],
        slot=slot,
        start=start,
        num_tokens=sequence.share,
        token_ids=sequence.token_ids(start, end),
        page_ids=sequence.page_tuple[: -(-end // books.limits.page_size)],
        sample_seats=sequence.seats if is_last else (),
        prompt_logprobs=top,
        next_prompt_token=following,
    )
    sequence.num_planned = end
    sequence.last_step = books.next_step
    parts.chunks.append(chunk)
    parts.rows.append((sequence, sequence.incarnation, end))
    parts.num_samples += len(chunk.sample_seats)
    if is_last:
        parts.complete.append(sequence)


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
    step = books.next_step
    for sequence in draft.filling:
        if sequence.last_step == step and not sequence.names_tokens:
            parts.rows.append((sequence, sequence.incarnation, sequence.num_planned))
    for sequence in draft.ending:
        if sequence.last_step == step and not sequence.names_tokens:
            del sequence.lane.decoding[sequence]
    for sequence in draft.skipped:
        books.look_at(sequence, step + 1)


def _begin_decodes(books: Books, sequence: Sequence) -> None:
    """Its prompt's last chunk is in the plan: every choice has a token in flight."""
    sequence.lane.decode(sequence)
    live = sequence.live
    for one in (sequence,) if live.forked else books.fork(sequence):
        if not one.exhausted:
            books.look_at(one, books.next_step + 1)
