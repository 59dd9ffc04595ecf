"""Every metric of the engine in one table, and the observers that each process feeds.

`METRICS` is data: name, kind, labels, help. A process makes the metrics of its role and writes them
to files (prometheus_client's multiprocess mode); the supervisor serves them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

#: The adapter label of everything beyond `--max-adapter-series`; the base model has its own name.
OTHER = "other"

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)
_STEP_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0)
_COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0)
_RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row: `roles` write it; `kind` is "counter", "gauge" or "histogram"."""

    name: str
    roles: tuple[str, ...]
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("loraplex_request_ttft_seconds", ("frontend",), "histogram",
           "Request received to first token sent, queue and load included.",
           ("adapter",), _SECONDS),
    Metric("loraplex_request_tpot_seconds", ("frontend",), "histogram",
           "Time between tokens: (last - first token time) / (tokens - 1).",
           ("adapter",), _SECONDS),
    Metric("loraplex_request_wait_seconds", ("frontend",), "histogram",
           "Request received to first planned, by cause: place, load, kv, budget.",
           ("adapter", "cause"), _SECONDS),
    Metric("loraplex_request_pause_seconds", ("frontend",), "histogram",
           "Time that a request's sequences spent paused between turns.",
           ("adapter",), _SECONDS),
    Metric("loraplex_tokens_total", ("frontend",), "counter",
           "Tokens by kind: prompt, cached, completion, discarded.", ("adapter", "kind")),
    Metric("loraplex_requests_total", ("frontend",), "counter",
           "Ended requests; outcome is OK or the name of the gRPC code.",
           ("adapter", "outcome")),
    Metric("loraplex_adapter_load_seconds", ("loader",), "histogram",
           "Weights asked for to packed in host memory, by where they came from.",
           ("adapter", "tier"), _SECONDS),
    Metric("loraplex_adapter_load_failures_total", ("loader",), "counter",
           "Loads that failed, by reason.", ("adapter", "reason")),
    Metric("loraplex_registry_revision", ("loader",), "gauge",
           "Revision of the registry that this engine has applied."),
    Metric("loraplex_step_batch_size", ("core",), "histogram",
           "Sequences in a step.", (), _COUNTS),
    Metric("loraplex_step_fill_ratio", ("core",), "histogram",
           "Sequences in a step divided by max_num_seqs.", (), _RATIOS),
    Metric("loraplex_step_distinct_adapters", ("core",), "histogram",
           "Distinct adapters in a step, the base not counted.", (), (0.0, *_COUNTS)),
    Metric("loraplex_step_segment_tokens", ("core",), "histogram",
           "Tokens of a step that share an adapter.", (), _COUNTS),
    Metric("loraplex_step_seconds", ("core",), "histogram",
           "Seconds of a step by part: plan, gpu (the runner's work, also on a CPU), commit.",
           ("part",), _STEP_SECONDS),
    Metric("loraplex_step_floor_seconds", ("core",), "histogram",
           "Least time of a step: the bytes it must read over the GPU's measured bandwidth, or its "
           "products over their rate. Its sum over that of part gpu is the useful share. "
           "On a GPU only.", (), _STEP_SECONDS),
    Metric("loraplex_step_deferred_sequences_total", ("core",), "counter",
           "Sequences that could not join a step, by reason.", ("reason",)),
    Metric("loraplex_waiting_sequences", ("core",), "gauge", "Sequences that wait."),
    Metric("loraplex_running_sequences", ("core",), "gauge", "Sequences that run."),
    Metric("loraplex_gpu_memory_bytes", ("core",), "gauge",
           "The device's memory by part: weights, kv, adapters, free, workspace, runtime (context, "
           "kernels, graphs, libraries).", ("part",)),
    Metric("loraplex_adapter_resident_bytes", ("core", "loader"), "gauge",
           "Bytes of adapters by tier: slot, host, disk (the caches as of the last load).",
           ("tier",)),
    Metric("loraplex_adapter_evictions_total", ("core", "loader"), "counter",
           "Adapters that left a tier to make room: slot, host, disk.", ("tier",)),
    Metric("loraplex_flow_wait_seconds", ("core",), "gauge",
           "How long the head of an adapter's queue has waited.", ("adapter",)),
    Metric("loraplex_flow_wait_bound_seconds", ("core",), "gauge",
           "Longest that an adapter can still wait for a place.", ("adapter",)),
    Metric("loraplex_flow_service_lag", ("core",), "gauge",
           "Weighted service by which an adapter is behind its tenant's others; negative: ahead.",
           ("adapter",)),
)  # fmt: skip


class AdapterNames:
    """Adapter names as label values: the first `limit` keep their names, the rest is `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._named: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._named:
            if len(self._named) >= self._limit:
                return OTHER
            self._named.add(name)
        return name


class MetricSet:
    """The metrics of one role, by name."""

    def __init__(self, role: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._metrics: dict[str, Any] = {
            metric.name: _make(metric, registry) for metric in METRICS if role in metric.roles
        }

    def count(self, name: str, amount: float = 1.0, /, **labels: str) -> None:
        self._child(name, labels).inc(amount)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        self._child(name, labels).set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        self._child(name, labels).observe(value)

    def _child(self, name: str, labels: Mapping[str, str]) -> Any:
        metric = self._metrics[name]
        return metric.labels(**labels) if labels else metric


def _make(metric: Metric, registry: CollectorRegistry) -> Any:
    labels: Sequence[str] = metric.labels
    match metric.kind:
        case "counter":
            return Counter(metric.name, metric.help, labels, registry=registry)
        case "gauge":
            return Gauge(
                metric.name, metric.help, labels, registry=registry,
                multiprocess_mode="livemostrecent",
            )  # fmt: skip
        case _:
            return Histogram(
                metric.name, metric.help, labels, registry=registry, buckets=metric.buckets
            )
