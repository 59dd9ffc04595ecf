"""The one loop that drives the core: take messages, step, give the outputs to their frontends.

Threads post messages and attach peers; only `run` touches the core. The loop never blocks on a
send (Peer.put does not), and sleeps while there is nothing to do.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from engine_svc.failures import failure_of
from engine_svc.messages import (
    Cancel,
    ExplainAnswer,
    ExplainRequest,
    SnapshotAnswer,
    SnapshotRequest,
    StopChoice,
    Submit,
)
from engine_svc.processes.socket import Peer
from engine_svc.shares import Shares
from engine_svc.snapshots import CoreSnapshot, RequestExplanation
from engine_svc.types import (
    Failure,
    OutputItem,
    Request,
    RequestEnded,
    RequestStats,
    StepOutputs,
    TenantQuota,
)
from loraplex.status import LoraplexError

#: While requests wait for weights or for copies into slots, the core is asked this often.
BUSY_WAIT_SECONDS = 0.002
#: Without any request.
IDLE_WAIT_SECONDS = 1.0


class Report(Protocol):
    """The part of the core's StepReport that the loop reads."""

    @property
    def step(self) -> int: ...
    @property
    def idle(self) -> bool: ...


class Core(Protocol):
    """The part of engine_svc.core.EngineCore that the loop drives."""

    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str, failure: Failure | None = None) -> None: ...
    def stop_choice(self, request_id: str, choice: int, keep_tokens: int) -> None: ...
    def step(self) -> Report: ...
    def take_outputs(self) -> tuple[OutputItem, ...]: ...
    def set_shares(
        self, tenant_weights: Mapping[str, float], adapter_weights: Mapping[str, float]
    ) -> None: ...
    def explain(self, request_id: str) -> RequestExplanation | None: ...
    def set_quotas(self, quotas: Mapping[str, TenantQuota]) -> None: ...


class CoreLoop:
    """Routes messages of any number of peers to one core, and its outputs back.

    `observe` gets every step's report; `stalled` gets each peer that did not read for too long,
    before its requests are cancelled.
    """

    def __init__(
        self,
        core: Core,
        snapshot: Callable[[], CoreSnapshot],
        observe: Callable[[Any], None] = lambda report: None,
        stalled: Callable[[Peer], None] = lambda peer: None,
    ) -> None:
        self._core = core
        self._snapshot = snapshot
        self._observe = observe
        self._stalled = stalled
        self._inbox: deque[tuple[Peer, object | None]] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self._stopping = False
        #: weights and queue limits that the core has not been told yet
        self._shares: Shares | None = None
        #: request id → who asked; ends with RequestEnded or its peer
        self._owner: dict[str, Peer] = {}
        self._open: dict[Peer, set[str]] = {}

    # ---- called by other threads

    def attach(self, peer: Peer) -> None:
        with self._changed:
            self._open[peer] = set()

    def post(self, peer: Peer, message: object) -> None:
        """Hand a message of `peer` to the core before its next step."""
        self._push(peer, message)

    def detach(self, peer: Peer) -> None:
        """The peer is gone: its requests are cancelled."""
        self._push(peer, None)

    def share(self, shares: Shares) -> None:
        """Weights and queue limits from the next step on; a later call replaces an earlier one."""
        with self._changed:
            self._shares = shares
            self._woken = True
            self._changed.notify()

    def wake(self) -> None:
        """Something that the core polls has an answer."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    # ---- the loop

    def run(self) -> None:
        """Until `stop`. An exception of the core ends the loop: it is a bug, not a request's."""
        while not self._stopping:
            self._apply_shares()
            for peer, message in self._take():
                self._handle(peer, message)
            report = self._core.step()
            self._deliver(report.step)
            self._observe(report)
            self._drop_stalled()
            if report.idle:
                self._sleep()

    def _push(self, peer: Peer, message: object | None) -> None:
        with self._changed:
            self._inbox.append((peer, message))
            self._changed.notify()

    def _take(self) -> list[tuple[Peer, object | None]]:
        with self._changed:
            self._woken = self._shares is not None
            taken = list(self._inbox)
            self._inbox.clear()
            return taken

    def _apply_shares(self) -> None:
        with self._changed:
            shares, self._shares = self._shares, None
        if shares is not None:
            self._core.set_shares(shares.tenant_weights, shares.adapter_weights)
            self._core.set_quotas(shares.quotas)

    def _sleep(self) -> None:
        with self._changed:
            if not self._inbox and not self._woken and not self._stopping:
                self._changed.wait(BUSY_WAIT_SECONDS if self._owner else IDLE_WAIT_SECONDS)

    def _handle(self, peer: Peer, message: object | None) -> None:
        match message:
            case Submit(request):
                self._submit(peer, request)
            case Cancel(request_id, failure):
                self._core.cancel(request_id, failure)
            case StopChoice(request_id, choice, keep_tokens):
                self._core.stop_choice(request_id, choice, keep_tokens)
            case SnapshotRequest(ticket):
                peer.put(SnapshotAnswer(ticket, self._snapshot()))
            case ExplainRequest(ticket, request_id):
                peer.put(ExplainAnswer(ticket, self._core.explain(request_id)))
            case None:
                self._drop(peer)

    def _submit(self, peer: Peer, request: Request) -> None:
        if peer not in self._open:
            return
        self._owner[request.request_id] = peer
        self._open[peer].add(request.request_id)
        try:
            self._core.submit(request)
        except LoraplexError as error:
            ended = RequestEnded(request.request_id, RequestStats(), failure_of(error))
            self._forget(ended.request_id)
            peer.put(StepOutputs(-1, (ended,)))

    def _deliver(self, step: int) -> None:
        items = self._core.take_outputs()
        if not items:
            return
        by_peer: dict[Peer, list[OutputItem]] = defaultdict(list)
        for item in items:
            owner = self._owner.get(item.request_id)
            if owner is not None:
                by_peer[owner].append(item)
            if isinstance(item, RequestEnded):
                self._forget(item.request_id)
        for peer, mine in by_peer.items():
            peer.put(StepOutputs(step, tuple(mine)))

    def _forget(self, request_id: str) -> None:
        owner = self._owner.pop(request_id, None)
        if owner is not None and owner in self._open:
            self._open[owner].discard(request_id)

    def _drop(self, peer: Peer) -> None:
        with self._changed:
            request_ids = self._open.pop(peer, set())
        for request_id in request_ids:
            self._owner.pop(request_id, None)
            self._core.cancel(request_id, None)
        peer.close()

    def _drop_stalled(self) -> None:
        for peer in [peer for peer in tuple(self._open) if peer.is_stalled()]:
            self._stalled(peer)  # first: its reader forgets it once it is closed
            self._drop(peer)
