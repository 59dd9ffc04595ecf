"""The registry watch against a real gRPC server with a scripted registry behind it."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent import futures

import grpc
import pytest

from engine_svc.adapters.watch import RegistryWatch
from engine_svc.names import NameMap
from loraplex.adapter_format import check_adapter, read_folder
from loraplex.channel import loopback_options
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc
from loraplex.status import FailedPrecondition, FieldInvalid, NotFound, Unavailable, to_grpc
from tests.support.tiny_adapters import BASE_NAME, tiny_base, write_adapter

DIGEST = "sha256:" + "b" * 64
WAIT_S = 10.0


class FakeRegistry(registry_pb2_grpc.AdapterRegistryServicer):
    """Keeps events in order; streams end when `cut` is called."""

    def __init__(self) -> None:
        self.events: list[pb.Event] = []
        self.changed = threading.Condition()
        self.generation = 0
        self.watched_from: list[int] = []
        self.weights_digest = DIGEST
        self.repeat_last = False
        self.heartbeat_s = 0.2

    def add(self, **fields) -> int:
        with self.changed:
            revision = (self.events[-1].revision if self.events else 0) + 1
            self.events.append(pb.Event(revision=revision, **fields))
            self.changed.notify_all()
            return revision

    def cut(self) -> None:
        with self.changed:
            self.generation += 1
            self.changed.notify_all()

    def cut_and_wait(self) -> None:
        """Until the watcher is back."""
        with self.changed:
            seen = len(self.watched_from)
            self.generation += 1
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: len(self.watched_from) > seen, WAIT_S)

    def GetBaseModel(self, request, context):
        if request.name not in (BASE_NAME, "org/tiny"):
            error = NotFound("no such base model", reason="BASE_MODEL_NOT_FOUND")
            context.abort_with_status(to_grpc(error))
        base = pb.BaseModel(name=BASE_NAME, weights_digest=self.weights_digest)
        return pb.GetBaseModelResponse(base_model=base)

    def WatchAdapters(self, request, context):
        with self.changed:
            self.watched_from.append(request.from_revision)
            generation, position = self.generation, request.from_revision
            current = self.events[-1].revision if self.events else 0
            self.changed.notify_all()
        if position > current:
            context.abort_with_status(to_grpc(FieldInvalid("from_revision", position, "known")))
        if self.repeat_last:
            position = max(0, position - 1)
        while context.is_active() and generation == self.generation:
            for event in self.events:
                if event.revision > position:
                    position = event.revision
                    yield pb.WatchAdaptersResponse(event=event)
            yield pb.WatchAdaptersResponse(caught_up_revision=position)
            with self.changed:
                self.changed.wait_for(
                    lambda at=position: (
                        generation != self.generation
                        or (bool(self.events) and self.events[-1].revision > at)
                        or not context.is_active()
                    ),
                    timeout=self.heartbeat_s,
                )


@contextlib.contextmanager
def served(registry, address="127.0.0.1:0"):
    server = grpc.server(
        futures.ThreadPoolExecutor(8), options=[*loopback_options(), ("grpc.so_reuseport", 0)]
    )
    registry_pb2_grpc.add_AdapterRegistryServicer_to_server(registry, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        registry.cut()
        server.stop(0).wait()


@contextlib.contextmanager
def watching(address, base=BASE_NAME, digest=DIGEST, **options):
    updates, names = queue.Queue(), NameMap()

    def take(update):
        names.apply(update)
        updates.put(update)

    statuses = queue.Queue()
    watch = RegistryWatch(
        address,
        base,
        digest,
        engine_id="e1",
        on_update=take,
        on_status=statuses.put,
        first_pause_s=0.02,
        **options,
    )
    watch.start()
    try:
        yield watch, names, updates, statuses
    finally:
        watch.stop()


@pytest.fixture
def manifest(tmp_path):
    files = read_folder(write_adapter(tmp_path / "a")).files
    return check_adapter(files, tiny_base()).manifest


def changed(manifest, name="sql-lora", version=1, state=pb.ADAPTER_STATE_ACTIVE, base=BASE_NAME):
    return {
        "type": pb.EVENT_TYPE_ADAPTER_CHANGED,
        "adapter": pb.Adapter(name=name, base_model=base, state=state, current_version=version),
        "version": pb.AdapterVersion(
            adapter=name,
            version=version,
            max_rank=4,
            manifest=pb.Manifest(digest=manifest.digest, canonical_json=manifest.canonical_json),
        ),
    }


def test_first_update_is_one_snapshot_then_one_update_a_revision(manifest):
    registry = FakeRegistry()
    registry.add(**changed(manifest))
    registry.add(**changed(manifest, "other", base="another-base"))
    alias = pb.SetAliasResponse(alias="sql", adapter="sql-lora")
    registry.add(type=pb.EVENT_TYPE_ALIAS_CHANGED, alias=alias)
    with served(registry) as address, watching(address, "org/tiny") as (watch, names, updates, _):
        first = updates.get(timeout=WAIT_S)
        assert first.snapshot
        assert first.revision == 3
        ref = names.resolve("sql", "default")
        assert (ref.version, ref.digest, ref.max_rank) == (1, manifest.digest, 4)
        assert [item.name for item in names.list("default")] == ["sql-lora"]
        assert watch.manifest(ref) == manifest
        registry.add(**changed(manifest, version=2))
        assert updates.get(timeout=WAIT_S).revision == 4
        assert names.resolve("sql-lora", "default").version == 2
        assert names.resolve("sql-lora@1", "default").version == 1
        assert watch.status.connected
        replica = NameMap()
        replica.apply(watch.snapshot())
        assert replica.snapshot() == names.snapshot()


def test_watch_resumes_from_the_applied_revision_and_applies_each_once(manifest):
    registry = FakeRegistry()
    registry.repeat_last = True
    registry.add(**changed(manifest))
    with served(registry) as address, watching(address) as (_, names, updates, _statuses):
        updates.get(timeout=WAIT_S)
        for version in (2, 3, 4):
            registry.cut_and_wait()
            registry.add(**changed(manifest, version=version))
            assert updates.get(timeout=WAIT_S).revision == version
        assert names.resolve("sql-lora", "default").version == 4
        assert updates.empty()
    assert registry.watched_from[0] == 0
    assert sorted(registry.watched_from) == registry.watched_from
    assert registry.watched_from[-1] == 3


def test_end_of_an_adapter_is_confirmed_by_watching_from_its_revision(manifest):
    registry = FakeRegistry()
    registry.add(**changed(manifest))
    with served(registry) as address, watching(address) as (_, names, updates, _statuses):
        updates.get(timeout=WAIT_S)
        revision = registry.add(**changed(manifest, state=pb.ADAPTER_STATE_DRAINING))
        updates.get(timeout=WAIT_S)
        with pytest.raises(NotFound):
            names.resolve("sql-lora", "default")
        with registry.changed:
            assert registry.changed.wait_for(lambda: revision in registry.watched_from, WAIT_S)


def test_restarted_registry_is_found_again_and_names_stand_meanwhile(manifest):
    registry = FakeRegistry()
    registry.add(**changed(manifest))
    with served(registry) as address:
        context = watching(address)
        watch, names, updates, statuses = context.__enter__()
        updates.get(timeout=WAIT_S)
    try:
        status = statuses.get(timeout=WAIT_S)
        while status.problem is None:
            status = statuses.get(timeout=WAIT_S)
        assert not status.connected
        assert status.problem.reason == "REGISTRY_UNREACHABLE"
        assert address in status.problem.message
        assert names.resolve("sql-lora", "default").version == 1
        registry.add(**changed(manifest, version=2))
        with served(registry, address):
            assert updates.get(timeout=WAIT_S).revision == 2
            assert watch.status.connected
    finally:
        context.__exit__(None, None, None)


def test_registry_that_lost_its_history_is_read_anew(manifest):
    registry = FakeRegistry()
    for version in (1, 2, 3):
        registry.add(**changed(manifest, version=version))
    with served(registry) as address, watching(address) as (_, names, updates, _statuses):
        updates.get(timeout=WAIT_S)
        registry.events = registry.events[:1]
        registry.cut()
        update = updates.get(timeout=WAIT_S)
        assert update.snapshot
        assert names.revision == 1
        assert names.resolve("sql-lora", "default").version == 1


def test_registry_that_falls_silent_counts_as_lost_and_is_watched_again(manifest):
    registry = FakeRegistry()
    registry.heartbeat_s = 3600.0
    registry.add(**changed(manifest))
    with (
        served(registry) as address,
        watching(address, silence_limit_s=0.05) as (_, names, updates, statuses),
    ):
        updates.get(timeout=WAIT_S)
        status = statuses.get(timeout=WAIT_S)
        while status.problem is None:
            status = statuses.get(timeout=WAIT_S)
        assert status.problem.reason == "REGISTRY_UNREACHABLE"
        with registry.changed:
            assert registry.changed.wait_for(lambda: len(registry.watched_from) > 3, WAIT_S)
        assert names.resolve("sql-lora", "default").version == 1
        registry.cut()


def test_other_weights_than_registered_are_fatal():
    registry = FakeRegistry()
    with (
        served(registry) as address,
        watching(address, digest="sha256:" + "0" * 64, weights_note=" (a note)") as watched,
    ):
        _, _, updates, statuses = watched
        status = statuses.get(timeout=WAIT_S)
        assert status.fatal
        assert status.problem.reason == "BASE_MODEL_MISMATCH"
        assert DIGEST in status.problem.message
        assert f"{'0' * 64} (a note);" in status.problem.message
        assert updates.empty()


def test_unregistered_base_model_is_named_and_waited_for():
    registry = FakeRegistry()
    with served(registry) as address, watching(address, "unknown") as (_, _names, _u, statuses):
        status = statuses.get(timeout=WAIT_S)
        assert not status.fatal
        assert status.problem.reason == "BASE_MODEL_NOT_FOUND"


def test_manifest_of_an_unknown_version_says_that_the_registry_is_away(manifest, tmp_path):
    registry = FakeRegistry()
    registry.add(**changed(manifest))
    with served(registry) as address:
        context = watching(address)
        watch, names, updates, _ = context.__enter__()
        updates.get(timeout=WAIT_S)
        ref = names.resolve("sql-lora", "default")
    try:
        unknown = type(ref)("sql-lora", 9, "sha256:" + "9" * 64)
        with pytest.raises(Unavailable) as raised:
            watch.manifest(unknown)
        assert raised.value.reason == "REGISTRY_UNREACHABLE"
        assert watch.manifest(ref) == manifest
    finally:
        context.__exit__(None, None, None)


def test_version_with_a_damaged_manifest_is_not_served(manifest):
    registry = FakeRegistry()
    event = changed(manifest)
    event["version"].manifest.canonical_json += b" "
    registry.add(**event)
    registry.add(**changed(manifest, "fine"))
    with served(registry) as address, watching(address) as (_, names, updates, _statuses):
        updates.get(timeout=WAIT_S)
        assert [ref.name for ref in names.list("default")] == ["fine"]


def test_wrong_base_of_a_manifest_is_refused(tmp_path, manifest):
    registry = FakeRegistry()
    files = read_folder(write_adapter(tmp_path / "b")).files
    other = tiny_base()
    foreign = check_adapter(
        files, type(other)("elsewhere", (), other.spec), base_model_confirmed=True
    ).manifest
    registry.add(**changed(foreign))
    with served(registry) as address, watching(address) as (watch, names, updates, _statuses):
        updates.get(timeout=WAIT_S)
        with pytest.raises(FailedPrecondition, match="elsewhere"):
            watch.manifest(names.resolve("sql-lora", "default"))
