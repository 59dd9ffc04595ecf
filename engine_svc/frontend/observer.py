"""What the frontend tells of each request when it has ended: to metrics, and to the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_svc.log import Log
from engine_svc.types import RequestStats


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, whole. Never holds prompts, tokens or text."""

    request_id: str
    tenant: str
    #: the base model's or the adapter's name; "" when the request named nothing that exists here
    model: str
    adapter_version: int = 0
    adapter_digest: str = ""
    #: "OK" or the gRPC code's name
    outcome: str = "OK"
    #: of loraplex.common.v1.ErrorReason; "" with OK
    reason: str = ""
    duration_s: float = 0.0
    #: None: no token was sent
    ttft_s: float | None = None
    #: None: fewer than two tokens were sent
    tpot_s: float | None = None
    choices: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    discarded_tokens: int = 0
    stats: RequestStats = field(default_factory=RequestStats)


class FrontendObserver(Protocol):
    """Told once of every Generate call; must not block or raise."""

    def request_ended(self, record: RequestRecord) -> None: ...


class Observers:
    """Tells several."""

    def __init__(self, observers: Sequence[FrontendObserver]) -> None:
        self._observers = tuple(observers)

    def request_ended(self, record: RequestRecord) -> None:
        for observer in self._observers:
            observer.request_ended(record)


class RequestLog:
    """One wide line a request: the event `request.ended`."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def request_ended(self, record: RequestRecord) -> None:
        self._log.info("request.ended", **wide_line(record))


def wide_line(record: RequestRecord) -> Mapping[str, Any]:
    """The fields of a request's log line; times in seconds, rounded to microseconds."""
    stats, waits = record.stats, record.stats.waits
    times = {
        "duration_s": record.duration_s,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "queue_s": waits.queue_s,
        "wait_place_s": waits.place_s,
        "wait_load_s": waits.load_s,
        "wait_kv_s": waits.kv_s,
        "wait_budget_s": waits.budget_s,
        "load_s": stats.load_s,
        "paused_s": stats.paused_s,
    }
    return {
        "request_id": record.request_id,
        "tenant": record.tenant,
        "model": record.model,
        "adapter_version": record.adapter_version,
        "adapter_digest": record.adapter_digest,
        "outcome": record.outcome,
        "reason": record.reason,
        "choices": record.choices,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "discarded_tokens": record.discarded_tokens,
        **{name: None if value is None else round(value, 6) for name, value in times.items()},
    }
