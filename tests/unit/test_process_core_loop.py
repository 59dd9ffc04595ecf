"""The core loop with a fake core: routing, cancelling, stalls, sleep."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from engine_svc.messages import (
    Cancel,
    ExplainAnswer,
    ExplainRequest,
    SnapshotAnswer,
    SnapshotRequest,
    StopChoice,
    Submit,
)
from engine_svc.processes import core_loop
from engine_svc.processes.core_loop import CoreLoop
from engine_svc.shares import Shares
from engine_svc.snapshots import CoreSnapshot, FlowSnapshot, RequestExplanation
from engine_svc.types import (
    Admitted,
    Failure,
    FlowKey,
    OutputItem,
    Request,
    RequestEnded,
    RequestStats,
    SamplingParams,
    ServiceClass,
    StepOutputs,
    TenantQuota,
)
from loraplex.status import ResourceExhausted
from tests.support.waiting import eventually


def request(request_id: str) -> Request:
    flow = FlowKey(ServiceClass.INTERACTIVE, "default", "")
    return Request(request_id, flow, (1, 2), SamplingParams(max_tokens=4, seed=1), 0.0)


@dataclass
class FakeReport:
    step: int
    idle: bool


@dataclass
class FakeCore:
    """Admits at once; ends a request when told."""

    calls: list[tuple[object, ...]] = field(default_factory=list)
    outputs: list[OutputItem] = field(default_factory=list)
    steps: int = 0
    refuse: bool = False

    def submit(self, request: Request) -> None:
        if self.refuse:
            raise ResourceExhausted("queue holds 1; limit 1")
        self.outputs.append(Admitted(request.request_id))

    def cancel(self, request_id: str, failure: Failure | None = None) -> None:
        self.calls.append(("cancel", request_id, failure))
        self.outputs.append(RequestEnded(request_id, RequestStats(), failure))

    def stop_choice(self, request_id: str, choice: int, keep_tokens: int) -> None:
        self.calls.append(("stop", request_id, choice, keep_tokens))

    def set_shares(
        self, tenant_weights: Mapping[str, float], adapter_weights: Mapping[str, float]
    ) -> None:
        self.calls.append(("shares", dict(tenant_weights), dict(adapter_weights)))

    def set_quotas(self, quotas: Mapping[str, TenantQuota]) -> None:
        self.calls.append(("quotas", dict(quotas)))

    def explain(self, request_id: str) -> RequestExplanation | None:
        if request_id != "known":
            return None
        return RequestExplanation(request_id, "waiting", FlowSnapshot(request("a").flow), "place")

    def step(self) -> FakeReport:
        self.steps += 1
        return FakeReport(self.steps, not self.outputs)

    def take_outputs(self) -> tuple[OutputItem, ...]:
        taken, self.outputs = tuple(self.outputs), []
        return taken

    def snapshot(self) -> CoreSnapshot:
        return CoreSnapshot(steps=self.steps)


class FakePeer:
    def __init__(self) -> None:
        self.messages: list[object] = []
        self.stalled = False
        self.closed = False

    def put(self, message: object) -> None:
        self.messages.append(message)

    def is_stalled(self) -> bool:
        return self.stalled

    def close(self) -> None:
        self.closed = True

    @property
    def items(self) -> list[OutputItem]:
        return [i for m in self.messages if isinstance(m, StepOutputs) for i in m.items]


@dataclass
class Running:
    core: FakeCore
    loop: CoreLoop
    stalled: list[object]


@pytest.fixture
def running() -> Iterator[Running]:
    core, stalled = FakeCore(), []
    loop = CoreLoop(core, core.snapshot, stalled=stalled.append)
    thread = threading.Thread(target=loop.run)
    thread.start()
    yield Running(core, loop, stalled)
    loop.stop()
    thread.join(5)
    assert not thread.is_alive()


def test_each_peer_hears_only_of_its_own_requests(running: Running) -> None:
    first, second = FakePeer(), FakePeer()
    for peer, name in ((first, "a"), (second, "b")):
        running.loop.attach(peer)
        running.loop.post(peer, Submit(request(name)))
    eventually(lambda: first.items and second.items)
    assert (first.items, second.items) == ([Admitted("a")], [Admitted("b")])


def test_cancel_and_stop_reach_the_core(running: Running) -> None:
    peer = FakePeer()
    running.loop.attach(peer)
    running.loop.post(peer, Submit(request("a")))
    running.loop.post(peer, StopChoice("a", 0, 3))
    running.loop.post(peer, Cancel("a"))
    eventually(lambda: any(isinstance(item, RequestEnded) for item in peer.items))
    assert running.core.calls == [("stop", "a", 0, 3), ("cancel", "a", None)]


def test_a_peer_that_goes_has_its_requests_cancelled_and_others_keep_theirs(
    running: Running,
) -> None:
    gone, staying = FakePeer(), FakePeer()
    for peer, name in ((gone, "a"), (staying, "b")):
        running.loop.attach(peer)
        running.loop.post(peer, Submit(request(name)))
    running.loop.detach(gone)
    eventually(lambda: running.core.calls)
    assert running.core.calls == [("cancel", "a", None)]
    assert gone.closed
    assert not staying.closed


def test_a_stalled_peer_is_dropped_and_reported(running: Running) -> None:
    peer = FakePeer()
    running.loop.attach(peer)
    running.loop.post(peer, Submit(request("a")))
    eventually(lambda: peer.items)
    peer.stalled = True
    running.loop.wake()
    eventually(lambda: running.stalled)
    assert running.stalled == [peer]
    assert running.core.calls == [("cancel", "a", None)]


def test_a_refused_request_ends_with_its_failure(running: Running) -> None:
    running.core.refuse = True
    peer = FakePeer()
    running.loop.attach(peer)
    running.loop.post(peer, Submit(request("a")))
    (item,) = eventually(lambda: peer.items)
    assert isinstance(item, RequestEnded)
    assert item.failure is not None
    assert (item.failure.code, item.failure.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")


def test_shares_reach_an_idle_core_at_once_and_the_last_ones_count(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_loop, "IDLE_WAIT_SECONDS", 60.0)
    running.loop.wake()
    quotas = {"acme": TenantQuota(3, 0)}
    running.loop.share(Shares({"acme": 2.0}, {"sha256:a": 4.0}, quotas))
    eventually(lambda: len(running.core.calls) >= 2)
    assert running.core.calls == [
        ("shares", {"acme": 2.0}, {"sha256:a": 4.0}),
        ("quotas", quotas),
    ]
    running.loop.share(Shares({"acme": 5.0}))
    eventually(lambda: ("shares", {"acme": 5.0}, {}) in running.core.calls)


def test_snapshot_is_answered_with_its_ticket(running: Running) -> None:
    peer = FakePeer()
    running.loop.attach(peer)
    running.loop.post(peer, SnapshotRequest(7))
    (answer,) = eventually(lambda: peer.messages)
    assert isinstance(answer, SnapshotAnswer)
    assert answer.ticket == 7


def test_an_explanation_is_answered_with_its_ticket_also_when_there_is_none(
    running: Running,
) -> None:
    peer = FakePeer()
    running.loop.attach(peer)
    running.loop.post(peer, ExplainRequest(8, "known"))
    running.loop.post(peer, ExplainRequest(9, "gone"))
    first, second = eventually(lambda: len(peer.messages) == 2 and peer.messages)
    assert isinstance(first, ExplainAnswer)
    assert first.explanation is not None
    assert (first.ticket, first.explanation.waits_for) == (8, "place")
    assert second == ExplainAnswer(9, None)


def test_an_idle_loop_sleeps_and_wakes_for_a_message(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_loop, "IDLE_WAIT_SECONDS", 60.0)
    running.loop.wake()
    before = running.core.steps
    peer = FakePeer()
    running.loop.attach(peer)
    running.loop.post(peer, SnapshotRequest(1))
    eventually(lambda: peer.messages)
    assert running.core.steps - before < 10
