"""Admission: a request enters the queue, or is refused before any page, load or step is spent."""

from __future__ import annotations

from engine_svc.core import failures
from engine_svc.core.books import Books
from engine_svc.core.lane import Lane
from engine_svc.core.limits import arena_tokens
from engine_svc.core.sequence import LiveRequest, Sequence, SequenceState
from engine_svc.core.waits import Cause
from engine_svc.types import Failure, FlowKey, Request

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
    return _overflow(books, request) or _too_slow(books, request, now)


def _overflow(books: Books, request: Request) -> Failure | None:
    """The queue, or the tenant's part of it, has no room for the request."""
    queue, limits, tenant = books.queue, books.limits, request.flow.tenant
    tokens = len(request.prompt_token_ids)
    if queue.num_requests >= limits.max_queued_requests:
        retry_s = _retry(books, queue.num_requests)
        return failures.queue_full(queue.num_requests, limits.max_queued_requests, retry_s)
    if queue.num_requests and queue.num_tokens + tokens > limits.max_queued_tokens:
        retry_s = _retry(books, queue.num_requests)
        return failures.queue_tokens_full(
            queue.num_tokens, tokens, limits.max_queued_tokens, retry_s
        )
    quota = queue.quota(tenant) or limits.tenant_quota
    if quota is None:
        return None
    num_requests, num_tokens = queue.size_of(tenant)
    for field, used, asked, limit in (
        ("max_queued_requests", num_requests, 1, quota.max_queued_requests),
        ("max_queued_tokens", num_tokens, tokens, quota.max_queued_tokens),
    ):
        if used + asked > limit:
            retry_s = _retry(books, num_requests)
            return failures.tenant_quota(tenant, field, used, asked, limit, retry_s)
    return None


def _too_slow(books: Books, request: Request, now: float) -> Failure | None:
    """It would wait longer than it, or the engine, allows."""
    wait_s = predicted_wait_s(books, request.flow)
    limit_s = min(books.limits.max_queue_wait_s, request.deadline_s - now)
    if wait_s <= limit_s:
        return None
    retry_s = _bounded(wait_s - limit_s)
    return failures.wait_exceeds_deadline(wait_s, limit_s, retry_s)


def predicted_wait_s(books: Books, key: FlowKey) -> float:
    """The wait for a place, then for what the flow has in the queue already."""
    rates = books.rates
    lane = books.lanes.get(key.digest)
    flow = None if lane is None else lane.flows.get(key)
    wait_s = 0.0
    if key.digest and key.digest not in books.turns:
        if flow is not None and flow.line >= 0:
            line = books.loading if lane is not None and lane.is_absent else books.ring
            num_before = line.num_before(flow)
        else:
            num_before = books.ring.num_before_newcomer(key)
        if len(books.placeless) + 1 > books.turns.num_free_places:
            wait_s = rates.turn_s * (num_before // books.limits.max_loras + 1)
    return wait_s if flow is None else wait_s + rates.queue_wait_s(flow)


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
    flow = books.flow(lane, request.flow, 1.0 if lane.ref is None else lane.ref.weight)
    sequence = Sequence(live, flow, 0, min(longest, lane.max_total))
    live.sequences.append(sequence)
    books.widest = max(books.widest if books.requests else 1, request.sampling.n)
    books.requests[request.request_id] = live
    books.queue.join(flow, len(request.prompt_token_ids))
    flow.num_requests += 1
    books.put_off(sequence, SequenceState.WAITING)
    if flow.line < 0 and not (flow.num_running and lane.digest in books.turns):
        books.lines.line_up(flow, books.next_step, now)
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
        most = max_total(books, request)
        lane = Lane(request.adapter, most, Cause.BUDGET, now, books.deferred, books.prompts)
        books.lanes[lane.digest] = lane
        books.lines.note_presence(lane, now)
    return lane


def _retry(books: Books, num_requests: int) -> float:
    """Seconds in which a tenth of so many requests will have been served, at the present rate."""
    rates, limits = books.rates, books.limits
    if not rates.service_rate:
        return _RETRY_AT_LEAST_S
    tokens = books.queue.num_tokens / max(1, books.queue.num_requests)
    service = tokens * limits.prefill_price + rates.output_tokens * limits.decode_price
    return _bounded(max(1, num_requests // 10) * service / rates.service_rate)


def _bounded(wait_s: float) -> float:
    return min(max(wait_s, _RETRY_AT_LEAST_S), _RETRY_AT_MOST_S)
