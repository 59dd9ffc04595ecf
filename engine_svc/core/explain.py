"""Why one request waits: a person asks, so a walk over the open requests is cheap enough."""

from __future__ import annotations

from engine_svc.core.admission import predicted_wait_s
from engine_svc.core.books import Books
from engine_svc.core.flow import Flow
from engine_svc.core.sequence import LiveRequest, SequenceState
from engine_svc.core.snapshot import flow_snapshot, tenant_snapshots
from engine_svc.core.waits import waits_between
from engine_svc.snapshots import RequestExplanation, TenantSnapshot
from engine_svc.types import EngineLimits


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
        tenant=_tenant(books, flow),
        service=service_of(live, books.limits),
        predicted_wait_s=predicted_wait_s(books, request.flow),
    )


def _tenant(books: Books, flow: Flow) -> TenantSnapshot | None:
    mine = (flow.key.service_class, flow.key.tenant)
    return next((t for t in tenant_snapshots(books) if (t.service_class, t.tenant) == mine), None)


def service_of(live: LiveRequest, limits: EngineLimits) -> float:
    """What it was charged: its prompt but for what was found, and what each choice decoded."""
    num_prompt = len(live.request.prompt_token_ids)
    prompt, decoded = 0, 0
    for sequence in live.sequences:
        charged = max(sequence.num_charged, 0 if sequence.names_tokens else sequence.num_planned)
        prompt = max(prompt, min(charged, num_prompt))
        decoded += max(0, charged - num_prompt)
    found = min(live.cached_tokens, prompt)
    return (prompt - found) * limits.prefill_price + decoded * limits.decode_price


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
