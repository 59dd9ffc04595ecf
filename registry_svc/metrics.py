"""Prometheus metrics of the registry, and their HTTP server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector as MetricSource

from loraplex.status import LoraplexError
from registry_svc.domain import Totals


class Metrics:
    """Counts of calls, and gauges read when somebody looks."""

    def __init__(self, totals: Callable[[], Totals], watchers: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "loraplex_registry_rpcs_total",
            "Calls that ended, by method and gRPC code.",
            ("method", "code"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "loraplex_registry_rpc_seconds",
            "Seconds from the call's arrival to its end, by method and gRPC code.",
            ("method", "code"),
            registry=self.registry,
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
        )
        self.registry.register(_Gauges(totals, watchers))

    def observe(self, method: str, code: str, seconds: float) -> None:
        self._calls.labels(method, code).inc()
        self._seconds.labels(method, code).observe(seconds)

    def serve(self, host: str, port: int) -> tuple[Any, int]:
        """Answer on `/metrics`. Returns: the server, and its port. Raises: OSError."""
        server, _ = start_http_server(port, host, self.registry)
        return server, server.server_port


class _Gauges(MetricSource):
    def __init__(self, totals: Callable[[], Totals], watchers: Callable[[], int]) -> None:
        self._totals, self._watchers = totals, watchers

    def collect(self) -> Iterator[Metric]:
        watchers = "Streams of WatchAdapters that are open."
        yield GaugeMetricFamily("loraplex_registry_watchers", watchers, self._watchers())
        try:
            totals, up = self._totals(), 1
        except LoraplexError:
            totals, up = Totals(), 0
        reach = "1 when the database answered this scrape; without it the next four are absent."
        yield GaugeMetricFamily("loraplex_registry_database_up", reach, up)
        if not up:
            return
        adapters = GaugeMetricFamily(
            "loraplex_registry_adapters", "Adapters by state.", labels=("state",)
        )
        for state, count in totals.adapters.items():
            adapters.add_metric((state,), count)
        yield adapters
        versions = "Adapter versions ever published."
        yield GaugeMetricFamily("loraplex_registry_versions", versions, totals.versions)
        blob_bytes = "Bytes of the blobs in the store."
        yield GaugeMetricFamily("loraplex_registry_blob_bytes", blob_bytes, totals.blob_bytes)
        revision = "The last committed revision."
        yield GaugeMetricFamily("loraplex_registry_revision", revision, totals.revision)
