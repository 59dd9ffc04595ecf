"""What each process tells its metrics: one observer for requests, one for steps, one for loads."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry

from engine_svc.frontend.observer import RequestRecord
from engine_svc.metrics import AdapterNames, MetricSet
from engine_svc.types import WeightsFailed, WeightsReady

NO_MODEL = "none"


class RequestMetrics:
    """engine_svc.frontend.observer.FrontendObserver: every ended Generate call."""

    def __init__(self, max_series: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics = MetricSet("frontend", registry)
        self._names = AdapterNames(max_series)

    def request_ended(self, record: RequestRecord) -> None:
        count, observe = self._metrics.count, self._metrics.observe
        adapter = self._names.label(record.model) if record.model else NO_MODEL
        count("loraplex_requests_total", adapter=adapter, outcome=record.outcome)
        if not record.model:
            return
        stats = record.stats
        for kind, tokens in (
            ("prompt", record.prompt_tokens),
            ("cached", stats.cached_tokens),
            ("completion", record.completion_tokens),
            ("discarded", record.discarded_tokens),
        ):
            count("loraplex_tokens_total", tokens, adapter=adapter, kind=kind)
        if record.ttft_s is None:
            return
        observe("loraplex_request_ttft_seconds", record.ttft_s, adapter=adapter)
        if record.tpot_s is not None:
            observe("loraplex_request_tpot_seconds", record.tpot_s, adapter=adapter)
        observe("loraplex_request_pause_seconds", stats.paused_s, adapter=adapter)
        waits = stats.waits
        for cause, seconds in (
            ("place", waits.place_s),
            ("load", waits.load_s),
            ("kv", waits.kv_s),
            ("budget", waits.budget_s),
        ):
            observe("loraplex_request_wait_seconds", seconds, adapter=adapter, cause=cause)


class LoadMetrics:
    """Every answer of the loader, and the registry's revision."""

    def __init__(self, max_series: int, registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics = MetricSet("loader", registry)
        self._names = AdapterNames(max_series)

    def answered(self, adapter: str, answer: WeightsReady | WeightsFailed) -> None:
        label = self._names.label(adapter)
        if isinstance(answer, WeightsReady):
            self._metrics.observe(
                "loraplex_adapter_load_seconds", answer.load_s, adapter=label, tier=answer.tier
            )
        else:
            self._metrics.count(
                "loraplex_adapter_load_failures_total",
                adapter=label,
                reason=answer.failure.reason,
            )

    def applied(self, revision: int) -> None:
        self._metrics.set("loraplex_registry_revision", revision)
