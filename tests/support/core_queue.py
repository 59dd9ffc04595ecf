"""Invariant 5, admission: the world's own count of the queue says who is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable

from engine_svc.core.admission import predicted_wait_s
from engine_svc.core.books import Books
from engine_svc.types import EngineLimits, Failure, Request


class AdmissionWatch:
    """What a request may be told, computed before it asks."""

    def __init__(self, limits: EngineLimits, books: Books) -> None:
        self.limits = limits
        self.books = books
        #: by id, what has been admitted, has not ended and has no chunk in a plan
        self.queued: dict[str, Request] = {}
        self.num_refused = 0

    def expected(
        self, request: Request, adapter_pages: int, now: float, draining: bool
    ) -> set[str]:
        """Reasons of a refusal, "" for none; several where the adapter's size may not be known."""
        limits = self.limits
        tokens = len(request.prompt_token_ids)
        if draining:
            return {"DRAINING"}
        if not tokens:
            return {"PROMPT_EMPTY"}
        if request.sampling.n > limits.max_num_seqs:
            return {"SAMPLING_INVALID"}
        least, most = (1, adapter_pages) if request.adapter else (0, 0)
        if tokens >= self._room(least):
            return {"PROMPT_TOO_LONG"}
        reasons = {"PROMPT_TOO_LONG"} if tokens >= self._room(most) else set()
        if request.deadline_s <= now:
            return reasons | {"DEADLINE_EXCEEDED"}
        return reasons | {self._overflow(request) or self._too_slow(request, now)}

    def _room(self, adapter_pages: int) -> int:
        limits = self.limits
        kv = (limits.num_pages - adapter_pages) * limits.page_size + 1
        return min(limits.context_tokens, kv)

    def _overflow(self, request: Request) -> str:
        limits, tokens = self.limits, len(request.prompt_token_ids)
        queued = list(self.queued.values())
        if len(queued) >= limits.max_queued_requests:
            return "QUEUE_FULL"
        if queued and tokens + _tokens(queued) > limits.max_queued_tokens:
            return "QUEUE_FULL"
        quota = self.books.queue.quota(request.flow.tenant) or limits.tenant_quota
        mine = [one for one in queued if one.flow.tenant == request.flow.tenant]
        if quota is None:
            return ""
        full = len(mine) + 1 > quota.max_queued_requests
        return "TENANT_QUOTA" if full or tokens + _tokens(mine) > quota.max_queued_tokens else ""

    def _too_slow(self, request: Request, now: float) -> str:
        allowed_s = min(self.limits.max_queue_wait_s, request.deadline_s - now)
        wait_s = predicted_wait_s(self.books, request.flow)
        assert math.isfinite(wait_s)
        assert wait_s >= 0
        return "WAIT_EXCEEDS_DEADLINE" if wait_s > allowed_s else ""

    def answered(self, request: Request, expected: set[str], failure: Failure | None) -> None:
        """`failure` None: it was admitted."""
        reason = "" if failure is None else failure.reason
        assert reason in expected, f"told {reason!r}, expected one of {expected}"
        if failure is None:
            self.queued[request.request_id] = request
            return
        self.num_refused += 1
        if failure.code == "RESOURCE_EXHAUSTED":
            assert failure.retry_after_s is not None
            assert 0 < failure.retry_after_s <= 30
        metadata = dict(failure.metadata)
        if reason == "WAIT_EXCEEDS_DEADLINE":
            assert float(metadata["wait_s"]) >= float(metadata["limit_s"])


def _tokens(requests: Iterable[Request]) -> int:
    return sum(len(request.prompt_token_ids) for request in requests)
