"""Plan a step: turns, places, tokens and pages become one StepPlan."""

from __future__ import annotations

from engine_svc.core.books import Books
from engine_svc.core.budget import divide_budget, start_waiting
from engine_svc.core.build import LaunchedStep, build_step
from engine_svc.core.draft import Draft
from engine_svc.core.eviction import oldest_live, oldest_runnable
from engine_svc.core.loads import Loads
from engine_svc.core.places import (
    begin_turn,
    close_turns,
    end_unused_turns,
    grant_places,
    is_ready,
)
from engine_svc.core.pressure import Claim
from engine_svc.core.start import try_start


def plan_step(books: Books, loads: Loads, now: float, num_in_flight: int) -> LaunchedStep | None:
    """Form the next step, or None when nothing can run."""
    books.page_copies.clear()
    books.opened.clear()
    books.charges.step_service = 0.0
    close_turns(books, now)
    loads.advance(now)
    grant_places(books, now)
    draft = _draft(books, now)
    if draft.is_empty and not num_in_flight and books.requests:
        _unlock(books, loads, now)
        draft = _draft(books, now)
    end_unused_turns(books, draft, num_in_flight, now)
    if draft.is_empty:
        books.rates.nothing_planned()
        return None
    return build_step(books, draft, num_in_flight, now)


def _draft(books: Books, now: float) -> Draft:
    draft = divide_budget(books, now)
    start_waiting(books, draft, now)
    return draft


def _unlock(books: Books, loads: Loads, now: float) -> None:
    """Everybody lacks what others keep: the oldest takes what it needs, so that it ends. While its
    adapter, or one whose pages it needs, is on its way, the ring goes on with all places and seats
    free."""
    for turn in books.turns:
        books.end_turn(turn, now)
    first, oldest = oldest_live(books), oldest_runnable(books)
    if first is not None and first.lane.is_absent and first.page_ids:
        loads.ask_now(first.lane, now)
    if oldest is None:
        return
    books.rescued = oldest.lane.digest
    if not is_ready(books, oldest.lane):
        loads.try_fill_now(oldest.lane, now)
    elif try_start(books, oldest, Claim.TURN, books.limits.min_chunk, now, True) is None:
        begin_turn(books, oldest.flow, now)
        for turn in books.turns:
            turn.is_rescue = True
        return
    grant_places(books, now)
