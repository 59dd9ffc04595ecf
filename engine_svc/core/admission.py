"""Admission: a request enters the queue, or is refused before any page, load or step is spent."""

from __future__ import annotations

from engine_svc.core import failures
from engine_svc.core.books import Books
from engine_svc.core.lane import Lane
from engine_svc.core.limits import arena_tokens
from engine_svc.core.sequence import LiveRequest, Sequence, SequenceState
from engine_svc.core.waits import Cause
from engine_svc.types import Failure, Request

_RETRY_AT_LEAST_S = 0.1
_RETRY_AT_MOST_S = 30.0


def refusal(books: Books, request: Request, now: float, draining: bool) -> Failure | None:
    """Why the request cannot be taken, or None."""
    if draining:
        return failures.draining()
    misfit = _misfit(books, request)
    if misfit is not None:
        return misfit
    if request.deadline_s <= now:
        return failures.deadline_exceeded(request.request_id)
    limit = books.limits.max_queued_requests
    if books.num_queued >= limit:
        return failures.queue_full(books.num_queued, limit, _retry(books))
    return None


def _misfit(books: Books, request: Request) -> Failure | None:
    """Why this request could not run even alone in an empty engine."""
    limits = books.limits
    if not request.prompt_token_ids:
        return failures.prompt_empty()
    if request.sampling.n > limits.max_num_seqs:
        return failures.too_many_choices(request.sampling.n, limits.max_num_seqs)
    tokens, most = len(request.prompt_token_ids), max_total(books, request)
    if tokens < most:
        return None
    because = "the context ends there"
    if most < limits.context_tokens:
        because = "the arena holds no more, even when it is empty"
    return failures.prompt_too_long(tokens, most - 1, because)


def admit(books: Books, request: Request, now: float) -> LiveRequest:
    """The request joins the queue of its adapter."""
    lane = _lane(books, request, now)
    live = LiveRequest(
        request=request,
        order=books.next_order(),
        arrived=lane.clock.read(now),
        before_s=max(0.0, now - request.received_s),
    )
    longest = len(request.prompt_token_ids) + request.sampling.max_tokens
    sequence = Sequence(live, lane, 0, min(longest, lane.max_total))
    live.sequences.append(sequence)
    books.requests[request.request_id] = live
    books.num_queued += 1
    lane.num_requests += 1
    lane.put(sequence, SequenceState.WAITING)
    if not books.is_in_line(lane):
        books.queue(lane, now)
    books.outputs.admitted(request.request_id)
    return live


def max_total(books: Books, request: Request) -> int:
    """Tokens that one sequence of this adapter may have, as far as its size is known."""
    digest, pages = request.flow.digest, 0
    slot, weights = books.memory.slots.get(digest), books.on_host.get(digest)
    if slot is not None:
        pages = slot.weights.num_pages
    elif weights is not None:
        pages = weights.num_pages
    elif request.adapter is not None:
        pages = 1
    return min(books.limits.context_tokens, arena_tokens(books.limits, pages))


def _lane(books: Books, request: Request, now: float) -> Lane:
    lane = books.lanes.get(request.flow.digest)
    if lane is None:
        lane = Lane(request.adapter, max_total(books, request), Cause.BUDGET, now, books.deferred)
        books.lanes[lane.digest] = lane
    return lane


def _retry(books: Books) -> float:
    """Seconds in which a tenth of the queue will have been started, at the recent rate."""
    wait_s = books.start_interval_s * max(1, books.num_queued // 10)
    return min(max(wait_s, _RETRY_AT_LEAST_S), _RETRY_AT_MOST_S)
