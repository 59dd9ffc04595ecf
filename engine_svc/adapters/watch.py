"""Follows the registry: one thread that turns its events into `NameMapUpdate`s, each revision once.

    connect → GetBaseModel (are these the weights that we serve?) → WatchAdapters(after the last
    applied revision) → one snapshot when first caught up → one update a revision, for ever

While the registry is away the last state stands; after nothing was heard for
SILENCE_LIMIT_S the connection counts as lost. Pauses between attempts grow to MAX_PAUSE_S.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from engine_svc.adapters.replica import Replica
from engine_svc.failures import failure_of
from engine_svc.names import NameMapUpdate
from engine_svc.types import AdapterRef, Failure
from loraplex.adapter_format import Manifest, parse_manifest
from loraplex.channel import channel_options
from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from loraplex.status import (
    FailedPrecondition,
    LoraplexError,
    NotFound,
    Unavailable,
    from_rpc_error,
)
from loraplex.tenants import tenant_metadata

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
#: the registry says something at least every 10 s
SILENCE_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class RegistryStatus:
    """Whether the names are live. `last_heard_s` is on the watch's clock, −inf before the first."""

    connected: bool = False
    applied_revision: int = 0
    last_heard_s: float = float("-inf")
    #: why it is not connected
    problem: Failure | None = None
    #: the registry's base model is another one than the engine's: only an operator can mend that
    fatal: bool = False


class RegistryWatch:
    """Start it once; `on_update` and `on_status` are called from its thread, in order.

    `base_model` is the name or alias under which the registry knows the engine's base model;
    `weights_digest` is that of the checkpoint in use; `weights_note` is said behind it where the
    registry has another.
    """

    def __init__(
        self,
        address: str,
        base_model: str,
        weights_digest: str,
        *,
        engine_id: str = "",
        weights_note: str = "",
        on_update: Callable[[NameMapUpdate], None],
        on_status: Callable[[RegistryStatus], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        first_pause_s: float = FIRST_PAUSE_S,
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._address, self._base_model = address, base_model
        self._weights_digest, self._engine_id = weights_digest, engine_id
        self._weights_note = weights_note
        self._on_update, self._on_status = on_update, on_status
        self._clock, self._first_pause_s = clock, first_pause_s
        self._silence_limit_s = silence_limit_s
        self._replica: Replica | None = None
        self._status = RegistryStatus()
        self._caught_up = False
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name="registry-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        self._stopping.set()
        with self._lock:
            if self._call is not None:
                self._call.cancel()
        self._thread.join(timeout_s)

    @property
    def status(self) -> RegistryStatus:
        return self._status

    def snapshot(self) -> NameMapUpdate:
        """All names, for a replica that starts now; empty before the first connection."""
        replica = self._replica
        return NameMapUpdate(0, snapshot=True) if replica is None else replica.snapshot()

    def manifest(self, ref: AdapterRef) -> Manifest:
        """The manifest of a version, from memory or, for one that no event named, the registry.

        Raises: NotFound; Unavailable REGISTRY_UNREACHABLE; AdapterRefused.
        """
        replica = self._replica
        text = None if replica is None else replica.manifest_text(ref.digest)
        if text is None:
            text = self._ask_manifest(ref)
        manifest = parse_manifest(text)
        if replica is not None and manifest.base_model != replica.base_model:
            raise FailedPrecondition(
                f"adapter {ref.name!r} is for base model {manifest.base_model!r}, this engine "
                f"serves {replica.base_model!r}",
                reason="BASE_MODEL_MISMATCH",
            )
        return manifest

    # ---- the thread

    def _run(self) -> None:
        pause = self._first_pause_s
        while not self._stopping.is_set():
            heard = self._status.last_heard_s
            try:
                self._follow()
                problem: LoraplexError = _unreachable(self._address, "it ended the watch")
            except grpc.RpcError as error:
                problem = _named(from_rpc_error(error), self._address)
                if problem.metadata.get("field") == "from_revision":
                    self._start_over("the registry does not know the revision that was applied")
            except LoraplexError as error:
                problem = error
            except Exception:
                log.exception("registry.watch_crashed")
                problem = _unreachable(self._address, "the watch failed; see the engine's log")
            fatal = isinstance(problem, FailedPrecondition)
            self._set_status(connected=False, problem=failure_of(problem), fatal=fatal)
            if self._status.last_heard_s > heard:
                pause = self._first_pause_s
            self._stopping.wait(pause)
            pause = min(2 * pause, MAX_PAUSE_S)

    def _follow(self) -> None:
        """One connection, until it ends."""
        options = [
            *channel_options(self._address),
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            # pauses between attempts are ours: a shared connection would add its own, up to 120 s
            ("grpc.use_local_subchannel_pool", 1),
        ]
        with grpc.insecure_channel(self._address, options=options) as channel:
            stub = registry_pb2_grpc.AdapterRegistryStub(channel)
            base = self._check_base(stub)
            if self._replica is None:
                self._replica = Replica(base.name)
            while self._watch(stub, self._replica):
                pass

    def _watch(self, stub: Any, replica: Replica) -> bool:
        """One stream. Returns: whether to open the next at once, which tells the registry what has
        been applied: it counts as the engine's word that an adapter has ended."""
        request = registry_pb2.WatchAdaptersRequest(
            from_revision=replica.revision, engine_id=self._engine_id
        )
        with self._lock:
            if self._stopping.is_set():
                return False
            call = self._call = stub.WatchAdapters(request)
        silence = _SilenceGuard(call, self._silence_limit_s)
        try:
            for message in call:
                silence.heard()
                if self._take(message, replica):
                    return True
        finally:
            silence.stop()
            call.cancel()
        return False

    def _check_base(self, stub: Any) -> registry_pb2.BaseModel:
        request = registry_pb2.GetBaseModelRequest(name=self._base_model)
        base: registry_pb2.BaseModel = stub.GetBaseModel(request, timeout=CALL_TIMEOUT_S).base_model
        if base.weights_digest != self._weights_digest:
            raise FailedPrecondition(
                f"base model {base.name!r}: the registry has weights {base.weights_digest}, this "
                f"engine's checkpoint is {self._weights_digest}{self._weights_note}; serve the "
                "registered checkpoint, or register this one under another name",
                reason="BASE_MODEL_MISMATCH",
                metadata={
                    "field": "base_model", "value": self._weights_digest,
                    "limit": base.weights_digest,
                },
            )  # fmt: skip
        return base

    def _take(self, message: registry_pb2.WatchAdaptersResponse, replica: Replica) -> bool:
        """Apply one message. Returns: whether the registry waits to hear that it was applied."""
        if message.WhichOneof("item") == "event":
            update = replica.apply(message.event)
            live = self._caught_up
            if update is not None and live:
                self._on_update(update)
            self._set_status(connected=live)
            return live and update is not None and update.ends_adapter
        revision = message.caught_up_revision
        if revision < replica.revision:
            self._start_over(f"the registry is at revision {revision}")
            raise _unreachable(self._address, "its history is shorter than before; reading it anew")
        replica.advance(revision)
        first = not self._caught_up
        if first:
            self._on_update(replica.snapshot())
            self._caught_up = True
        self._set_status(connected=True)
        return first

    def _start_over(self, cause: str) -> None:
        """The registry's history is shorter than ours, as after a restore: read it from 0. The old
        names stand until the new ones are complete."""
        had = 0 if self._replica is None else self._replica.revision
        log.warning("registry.history_lost", extra={"applied": had, "cause": cause})
        self._replica = None
        self._caught_up = False

    def _set_status(
        self, *, connected: bool, problem: Failure | None = None, fatal: bool = False
    ) -> None:
        before = self._status
        heard = problem is None
        replica = self._replica
        self._status = RegistryStatus(
            connected,
            0 if replica is None else replica.revision,
            self._clock() if heard else before.last_heard_s,
            problem,
            fatal,
        )
        if self._on_status is not None and (
            (before.connected, before.problem) != (connected, problem)
            or before.applied_revision != self._status.applied_revision
        ):
            self._on_status(self._status)

    def _ask_manifest(self, ref: AdapterRef) -> bytes:
        request = registry_pb2.ResolveAdapterRequest(reference=f"{ref.name}@{ref.digest}")
        try:
            with grpc.insecure_channel(
                self._address, options=channel_options(self._address)
            ) as channel:
                stub = registry_pb2_grpc.AdapterRegistryStub(channel)
                metadata = tenant_metadata(ref.tenant)
                answer = stub.ResolveAdapter(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            raise _named(from_rpc_error(error), self._address) from error
        text: bytes = answer.version.manifest.canonical_json
        if not text:
            raise NotFound(f"adapter {ref.name!r}: the registry knows no version {ref.digest}")
        return text


class _SilenceGuard:
    """Cancels a call from which nothing has been heard for too long."""

    def __init__(self, call: Any, limit_s: float) -> None:
        self._call, self._limit_s = call, limit_s
        self._changed = threading.Condition()
        self._heard = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="registry-silence", daemon=True)
        self._thread.start()

    def heard(self) -> None:
        with self._changed:
            self._heard = True
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while self._changed.wait_for(lambda: self._heard or self._stopped, self._limit_s):
                if self._stopped:
                    return
                self._heard = False
        self._call.cancel()


def _named(error: LoraplexError, address: str) -> LoraplexError:
    """Transport errors as REGISTRY_UNREACHABLE, the registry's own as they are."""
    transport = error.reason in (
        "TRANSPORT", "INVARIANT", "DRAINING", "CANCELLED", "DEADLINE_EXCEEDED",
    )  # fmt: skip
    return _unreachable(address, error.message) if transport else error


def _unreachable(address: str, problem: str) -> Unavailable:
    return Unavailable(
        f"the registry at {address} cannot be reached: {problem}",
        reason="REGISTRY_UNREACHABLE",
        metadata={"address": address},
        retry_after_s=1.0,
    )
