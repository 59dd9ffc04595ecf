"""Invariant 2, bounded unfairness, checked after every step on the core's own counters."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.books import Books
from engine_svc.core.flow import Flow
from engine_svc.core.limits import resolved_quantum
from engine_svc.core.shares import Share
from engine_svc.core.turns import quantum_of
from engine_svc.types import EngineLimits, Request


@dataclass
class Window:
    """Two shares that have both demanded since some step, and the lead of the first then."""

    lead_at_first: float


def service_of(request: Request, limits: EngineLimits) -> float:
    """The most that a request can be charged."""
    prompt = len(request.prompt_token_ids) * limits.prefill_price
    return prompt + request.sampling.n * request.sampling.max_tokens * limits.decode_price


class GapWatch:
    """Of two tenants of a class, or two flows of a tenant, that demand throughout, neither leads
    by more than when that began and its own constant

        U = (S·R + (P + 1)·(2·Q + 2·B) + 2·Q) / weight

    S max_num_seqs, R the service of the largest request, Q the largest quantum of a turn of its,
    B the service of the largest step, P the places that it can hold at once: M for a tenant, 1 for
    a flow. Why, for a ahead of b since some step:

    - b holds an open turn. Nobody of a starts: b, who has had less, comes first in its turn
      (heads.py) and the ring gives way to it (precedence.py). What of a runs then goes on to its
      end: at most S sequences, S·R. Its prompts take no token that those of b, or who of b could
      start, can use (budget.py), but for a piece in a step, which is inside R.
    - b waits in the ring. a has at most P open turns and one grant before b's. A turn is charged
      its quantum, at most another while it closes, and the step in which each of the two was
      reached; so do the steps in flight: (P + 1)·(2·Q + 2·B). A turn goes on beyond that only
      while its tenant is behind the ring's head, so that a then leads by no more than the head.
    - b's turn ends with no more than the ring's head had. What a's turns overdrew until then is
      owed, at most 2·Q, and taken off its next ones.

    Holds where turns end by service: `turn_max_steps` bounds the wait whatever the counters say,
    so a flow that cannot use its turn inside them gets less. And where pages suffice: see
    `core_kv` for who gives them up.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.largest_request = 0.0
        #: the largest lead ÷ what is allowed, and steps × pairs that were looked at
        self.closest = 0.0
        self.num_looks = 0
        self._windows: dict[tuple[Share, Share], Window] = {}

    def submitted(self, request: Request) -> None:
        self.largest_request = max(self.largest_request, service_of(request, self.limits))

    def reweighed(self) -> None:
        """Counters before and after count different things."""
        self._windows.clear()

    def look(self, books: Books) -> None:
        """After a step."""
        flows = [
            flow
            for lane in books.lanes.values()
            for flow in lane.flows.values()
            if flow.waiting and not lane.is_absent
        ]
        accounts: dict[Share, list[Flow]] = {}
        for flow in flows:
            accounts.setdefault(flow.account, []).append(flow)
        present: set[tuple[Share, Share]] = set()
        for account, own in accounts.items():
            for other in accounts:
                if other is not account and other.parent is account.parent:
                    present.add((account, other))
                    self._check(account, other, own, self.limits.max_loras)
            for flow in own:
                for sibling in own:
                    if sibling is not flow:
                        present.add((flow.share, sibling.share))
                        self._check(flow.share, sibling.share, [flow], 1)
        for gone in self._windows.keys() - present:
            del self._windows[gone]

    def _check(self, share: Share, other: Share, flows: list[Flow], places: int) -> None:
        lead = share.counter - other.counter
        window = self._windows.setdefault((share, other), Window(max(lead, 0.0)))
        limit = window.lead_at_first + self.constant(share, flows, places)
        self.num_looks += 1
        self.closest = max(self.closest, lead / limit)
        assert lead <= limit, f"{share.key} leads {other.key} by {lead}, at most {limit}"

    def constant(self, share: Share, flows: list[Flow], places: int) -> float:
        """U of a tenant with these flows, or of one of them."""
        limits = self.limits
        step = limits.prefill_price * limits.max_num_batched_tokens
        step += limits.decode_price * limits.max_num_seqs
        base = resolved_quantum(limits)
        quantum = max(quantum_of(flow, base) for flow in flows)
        running = limits.max_num_seqs * self.largest_request
        return (running + (places + 1) * 2 * (quantum + step) + 2 * quantum) / share.weight
