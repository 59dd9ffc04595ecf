"""What each process tells its metrics: one observer for requests, one for steps, one for loads."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import REGISTRY, CollectorRegistry

from engine_svc.core.report import StepReport
from engine_svc.frontend.observer import RequestRecord
from engine_svc.metrics import AdapterNames, MetricSet
from engine_svc.snapshots import CoreSnapshot
from engine_svc.types import WeightsFailed, WeightsReady

NO_MODEL = "none"
#: A snapshot walks all requests: not every step.
SNAPSHOT_STEPS = 50


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
        self._evictions: dict[str, int] = {}

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

    def cached(self, tier: str, num_bytes: int, evictions: int) -> None:
        """The host or disk cache now; `evictions` since the loader's start."""
        self._metrics.set("loraplex_adapter_resident_bytes", num_bytes, tier=tier)
        new = evictions - self._evictions.get(tier, 0)
        self._metrics.count("loraplex_adapter_evictions_total", new, tier=tier)
        self._evictions[tier] = evictions

    def applied(self, revision: int) -> None:
        self._metrics.set("loraplex_registry_revision", revision)


_FLOW_GAUGES = (
    "loraplex_flow_wait_seconds",
    "loraplex_flow_wait_bound_seconds",
    "loraplex_flow_service_lag",
)
#: the gauges of an adapter without any flow
_NO_FLOW = (0.0, 0.0, 0.0)


def _larger(
    a: tuple[float, float, float], b: tuple[float, float, float]
) -> tuple[float, float, float]:
    return max(a[0], b[0]), max(a[1], b[1]), max(a[2], b[2])


class StepMetrics:
    """Every step; the state every SNAPSHOT_STEPS steps and when the core falls idle."""

    def __init__(
        self,
        max_series: int,
        snapshot: Callable[[], CoreSnapshot],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._metrics = MetricSet("core", registry)
        self._names = AdapterNames(max_series)
        self._snapshot = snapshot
        self._steps_until_state = 0
        self._was_idle = False
        self._shown_flows: set[str] = set()
        self._slot_evictions = 0

    def stepped(self, report: StepReport) -> None:
        if report.step >= 0:
            self._count(report)
        self._steps_until_state -= report.step >= 0
        if self._steps_until_state < 0 or (report.idle and not self._was_idle):
            self._steps_until_state = SNAPSHOT_STEPS
            self._show(self._snapshot())
        self._was_idle = report.idle

    def floor(self, seconds: float) -> None:
        """Of the step that was launched last."""
        self._metrics.observe("loraplex_step_floor_seconds", seconds)

    def _count(self, report: StepReport) -> None:
        observe = self._metrics.observe
        observe("loraplex_step_batch_size", report.num_sequences)
        observe("loraplex_step_fill_ratio", report.fill)
        observe("loraplex_step_distinct_adapters", report.num_adapters)
        for tokens in report.segments:
            observe("loraplex_step_segment_tokens", tokens)
        observe("loraplex_step_seconds", report.plan_s, part="plan")
        observe("loraplex_step_seconds", report.compute_s, part="gpu")
        observe("loraplex_step_seconds", report.commit_s, part="commit")
        for cause, sequences in report.deferred:
            self._metrics.count(
                "loraplex_step_deferred_sequences_total", sequences, reason=cause.name.lower()
            )

    def _show(self, state: CoreSnapshot) -> None:
        put, memory = self._metrics.set, state.memory
        put("loraplex_waiting_sequences", state.waiting_sequences)
        put("loraplex_running_sequences", state.running_sequences)
        for part in ("weights", "kv", "adapters", "free", "workspace", "runtime"):
            put("loraplex_gpu_memory_bytes", getattr(memory, f"{part}_bytes"), part=part)
        resident = sum(one.num_bytes for one in state.residents if one.tier == "slot")
        put("loraplex_adapter_resident_bytes", resident, tier="slot")
        evicted = state.slot_evictions - self._slot_evictions
        self._metrics.count("loraplex_adapter_evictions_total", evicted, tier="slot")
        self._slot_evictions = state.slot_evictions
        self._show_flows(state)

    def _show_flows(self, state: CoreSnapshot) -> None:
        """One series an adapter: the worst of its flows; 0 once it has none."""
        worst = dict.fromkeys(self._shown_flows, _NO_FLOW)
        for flow in state.flows:
            if flow.adapter is not None:
                label = self._names.label(flow.adapter.name)
                mine = (flow.waited_s, flow.wait_bound_s, flow.service_lag)
                before = worst.get(label, _NO_FLOW)
                worst[label] = mine if before is _NO_FLOW else _larger(before, mine)
        for label, values in worst.items():
            for name, value in zip(_FLOW_GAUGES, values, strict=True):
                self._metrics.set(name, value, adapter=label)
        self._shown_flows |= worst.keys()
