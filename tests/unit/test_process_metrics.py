"""The metric table and what the observers make of records."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine_svc.core.report import StepReport
from engine_svc.core.waits import Cause
from engine_svc.frontend.observer import RequestRecord
from engine_svc.metrics import METRICS, OTHER, AdapterNames, MetricSet
from engine_svc.observing import LoadMetrics, RequestMetrics, StepMetrics
from engine_svc.processes.metrics_server import MetricsServer
from engine_svc.settings import SettingInvalid
from engine_svc.snapshots import CoreSnapshot, FlowSnapshot, MemorySnapshot, ResidentAdapter
from engine_svc.types import (
    AdapterRef,
    Failure,
    FlowKey,
    HostSpan,
    RequestStats,
    ServiceClass,
    Waits,
    WeightsFailed,
    WeightsReady,
)


def values(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """(sample name, label values in the order of their names) → value."""
    text = generate_latest(registry).decode()
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_can_be_made_once_and_is_named_after_the_product() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for role in {role for metric in METRICS for role in metric.roles}:
        MetricSet(role, CollectorRegistry())
    assert all(metric.name.startswith("loraplex_") and metric.help for metric in METRICS)


def test_a_series_once_named_keeps_its_name_and_the_rest_is_other() -> None:
    names = AdapterNames(2)
    assert [names.label(name) for name in "abcab"] == ["a", "b", OTHER, "a", "b"]


def test_an_ended_request_is_counted_under_its_adapter() -> None:
    registry = CollectorRegistry()
    record = RequestRecord(
        "id", "default", "sql-lora", ttft_s=0.5, tpot_s=0.01, prompt_tokens=7, completion_tokens=3,
        stats=RequestStats(waits=Waits(place_s=0.25), cached_tokens=4),
    )  # fmt: skip
    RequestMetrics(10, registry).request_ended(record)
    seen = values(registry)
    assert seen["loraplex_requests_total", "sql-lora", "OK"] == 1
    assert seen["loraplex_tokens_total", "sql-lora", "completion"] == 3
    assert seen["loraplex_tokens_total", "sql-lora", "cached"] == 4
    assert seen["loraplex_request_ttft_seconds_sum", "sql-lora"] == 0.5
    assert seen["loraplex_request_wait_seconds_sum", "sql-lora", "place"] == 0.25


def test_a_refused_request_has_an_outcome_and_no_times() -> None:
    registry = CollectorRegistry()
    RequestMetrics(10, registry).request_ended(
        RequestRecord("id", "default", "", outcome="NOT_FOUND", reason="MODEL_NOT_FOUND")
    )
    seen = values(registry)
    assert seen["loraplex_requests_total", "none", "NOT_FOUND"] == 1
    assert not [key for key in seen if key[0].startswith("loraplex_request_ttft")]


def test_loads_are_observed_by_tier_and_failures_by_reason() -> None:
    registry = CollectorRegistry()
    metrics = LoadMetrics(10, registry)
    metrics.answered("a", WeightsReady("d", HostSpan(0, 1), 1, 1, "disk", 0.5))
    metrics.answered("b", WeightsFailed("e", Failure("DATA_LOSS", "DIGEST_MISMATCH", "")))
    metrics.applied(9)
    metrics.cached("host", num_bytes=70, evictions=2)
    metrics.cached("host", num_bytes=40, evictions=5)
    metrics.cached("disk", num_bytes=90, evictions=1)
    seen = values(registry)
    assert seen["loraplex_adapter_resident_bytes", "host"] == 40
    assert seen["loraplex_adapter_resident_bytes", "disk"] == 90
    assert seen["loraplex_adapter_evictions_total", "host"] == 5
    assert seen["loraplex_adapter_evictions_total", "disk"] == 1
    assert seen["loraplex_adapter_load_seconds_sum", "a", "disk"] == 0.5
    assert seen["loraplex_adapter_load_failures_total", "b", "DIGEST_MISMATCH"] == 1
    assert seen["loraplex_registry_revision",] == 9


def test_steps_are_observed_and_the_state_shown_when_the_core_falls_idle() -> None:
    registry = CollectorRegistry()
    ref = AdapterRef("sql-lora", 1, "sha256:d")
    flow = FlowKey(ServiceClass.INTERACTIVE, "default", ref.digest)
    batch = FlowKey(ServiceClass.BATCH, "default", ref.digest)
    base = FlowKey(ServiceClass.INTERACTIVE, "default", "")
    states = [
        CoreSnapshot(
            memory=MemorySnapshot(kv_bytes=7, free_bytes=3, runtime_bytes=5),
            residents=(ResidentAdapter(ref, "slot", 40),),
            flows=(
                FlowSnapshot(flow, ref, waited_s=0.5, wait_bound_s=2.0, service_lag=-3.0),
                FlowSnapshot(batch, ref, waited_s=0.25, wait_bound_s=4.0, service_lag=-1.0),
                FlowSnapshot(base, waited_s=9.0),
            ),
            slot_evictions=2,
        ),
        CoreSnapshot(slot_evictions=5),
    ]
    metrics = StepMetrics(10, lambda: states[0], registry)
    metrics.stepped(report(step=0, num_sequences=3, segments=(5, 6), compute_s=0.25))
    seen = values(registry)
    assert seen["loraplex_step_batch_size_sum",] == 3
    assert seen["loraplex_step_segment_tokens_sum",] == 11
    assert seen["loraplex_step_seconds_sum", "gpu"] == 0.25
    assert seen["loraplex_step_deferred_sequences_total", "place"] == 2
    assert seen["loraplex_gpu_memory_bytes", "kv"] == 7
    assert seen["loraplex_gpu_memory_bytes", "runtime"] == 5
    assert seen["loraplex_adapter_resident_bytes", "slot"] == 40
    assert seen["loraplex_adapter_evictions_total", "slot"] == 2
    assert seen["loraplex_flow_wait_seconds", "sql-lora"] == 0.5
    assert seen["loraplex_flow_wait_bound_seconds", "sql-lora"] == 4.0
    assert seen["loraplex_flow_service_lag", "sql-lora"] == -1.0
    states.pop(0)
    metrics.stepped(report(step=-1, idle=True))
    seen = values(registry)
    assert seen["loraplex_flow_wait_seconds", "sql-lora"] == 0
    assert seen["loraplex_flow_service_lag", "sql-lora"] == 0
    assert seen["loraplex_adapter_evictions_total", "slot"] == 5
    assert seen["loraplex_gpu_memory_bytes", "kv"] == 0
    assert seen["loraplex_step_batch_size_count",] == 1


def report(
    step: int, num_sequences: int = 0, segments: tuple[int, ...] = (), compute_s: float = 0.0,
    idle: bool = False,
) -> StepReport:  # fmt: skip
    return StepReport(
        step=step, num_tokens=sum(segments), num_sequences=num_sequences, fill=0.5, num_adapters=2,
        segments=segments, plan_s=0.001, compute_s=compute_s, commit_s=0.002,
        deferred=((Cause.PLACE, 2),), waiting=2, running=num_sequences, idle=idle,
    )  # fmt: skip


def test_metrics_of_several_processes_are_served_together(tmp_path: Path) -> None:
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    program = (
        "from engine_svc.metrics import MetricSet; m = MetricSet('core');"
        "m.count('loraplex_step_deferred_sequences_total', 2, reason='place');"
        "m.set('loraplex_waiting_sequences', 5); import os; print(os.getpid())"
    )
    pids = [
        int(subprocess.run(
            [sys.executable, "-c", program], env=environ, check=True, capture_output=True, text=True
        ).stdout)
        for _ in range(2)
    ]  # fmt: skip
    server = MetricsServer("--metrics-listen", "127.0.0.1:0", tmp_path)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def scrape(path: str = "/metrics") -> str:
        with opener.open(f"http://{server.address}{path}", timeout=5) as answer:
            text: str = answer.read().decode()
        return text

    text = scrape()
    assert 'loraplex_step_deferred_sequences_total{reason="place"} 4.0' in text
    assert "loraplex_waiting_sequences 5.0" in text
    for pid in pids:
        server.forget(pid)
    text = scrape()
    assert 'loraplex_step_deferred_sequences_total{reason="place"} 4.0' in text
    assert "loraplex_waiting_sequences 5.0" not in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        scrape("/secrets")
    with pytest.raises(SettingInvalid, match=r"--metrics-listen is .*port \d+ cannot be used"):
        MetricsServer("--metrics-listen", server.address, tmp_path)
    # as when the engine has stopped: first the files are gone, then their folder
    (tmp_path / "counter_1.db").symlink_to(tmp_path / "gone")
    with pytest.raises(urllib.error.HTTPError, match="503"):
        scrape()
    shutil.rmtree(tmp_path)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        scrape()
