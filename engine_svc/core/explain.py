"""Why one request waits: a person asks, so a walk over the open requests is cheap enough."""

from __future__ import annotations

from engine_svc.core.books import Books
from engine_svc.core.sequence import LiveRequest, SequenceState
from engine_svc.core.snapshot import flow_snapshot
from engine_svc.core.waits import waits_between
from engine_svc.types import RequestExplanation


def explain(books: Books, request_id: str, now: float) -> RequestExplanation | None:
    """`request_id` is ours or the client's, of several with the client's id the oldest; None: no
    open request has it."""
    live = books.requests.get(request_id)
    if live is None:
        named = (one for one in books.requests.values() if _client_id(one) == request_id)
        live = next(named, None)
    if live is None:
        return None
    flow = live.sequences[0].flow
    lane = flow.lane
    waits = live.waits or waits_between(live.arrived, lane.clock.read(now), live.before_s)
    state = _state(live)
    request = live.request
    paused_since = [s.suspended_s for s in live.sequences if s.state is SequenceState.SUSPENDED]
    paused_s = live.paused_s + (now - min(paused_since) if state == "paused" else 0.0)
    oldest = next(
        (one for one in books.requests.values()
         if one.waits is None and one.request.flow == request.flow),
        None,
    )  # fmt: skip
    return RequestExplanation(
        request_id=_client_id(live),
        state=state,
        flow=flow_snapshot(books, flow, oldest, now),
        waits_for="" if state == "running" else lane.clock.cause.name.lower(),
        ahead=_num_ahead(live) if state == "waiting" else 0,
        waits=waits,
        paused_s=paused_s,
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=sum(len(s.output_ids) for s in live.sequences),
        demanding_adapters=len(books.ring),
        max_loras=books.limits.max_loras,
    )


def _client_id(live: LiveRequest) -> str:
    return live.request.client_request_id or live.request.request_id


def _state(live: LiveRequest) -> str:
    """Running if any of its choices runs."""
    states = {sequence.state for sequence in live.sequences}
    if SequenceState.RUNNING in states:
        return "running"
    return "paused" if SequenceState.SUSPENDED in states else "waiting"


def _num_ahead(live: LiveRequest) -> int:
    """Those of its flow that start before it: what was paused, and what arrived earlier."""
    flow = live.sequences[0].flow
    earlier = sum(age < live.sequences[0].age for age in flow.waiting)
    return earlier + len(flow.suspended)
