"""Uploads and garbage collection: nothing half-written is seen, nothing in use is removed."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.status import LoraplexError, from_rpc_error
from registry_svc.database import Database
from registry_svc.repository.transaction import Transaction
from registry_svc.service.collector import Collector
from tests.support.registry_service import (
    Registry,
    blob_messages,
    digest,
    file_messages,
    header_message,
    read_files,
    running_registry,
    sqlite_url,
)
from tests.support.tiny_adapters import BASE_NAME

pytest_plugins = ("tests.support.registry_fixtures",)

BLOB = bytes(range(256)) * 20
OTHER = b"other" * 100


def test_only_missing_blobs_are_asked_for(registry: Registry) -> None:
    registry.upload({"a": BLOB})
    started = registry.call("StartUpload", files=file_messages({"b": BLOB, "c": OTHER, "d": OTHER}))
    assert list(started.missing_sha256) == [digest(OTHER)]
    assert started.expire_time.seconds > 0
    done = registry.send("UploadBlob", blob_messages(started.upload_id, BLOB))
    assert not done.stored, "the store had it"


def test_a_bad_file_is_refused(registry: Registry) -> None:
    for name, size, sha256 in (
        ("../evil", 1, "0" * 64),
        ("a/b", 1, "0" * 64),
        ("a", -1, "0" * 64),
        ("a", 1, "0" * 63),
        ("a", 1, "../" + "0" * 61),
        ("a", 1, "A" * 64),
        ("a", 1 << 60, "0" * 64),
    ):
        files = [pb.File(name=name, size_bytes=size, sha256=sha256)]
        refused = registry.refused("StartUpload", files=files)
        assert refused.reason == ("SIZE_LIMIT" if size > 1 << 50 else "FIELD_INVALID"), files
        assert {"field", "value", "limit"} <= refused.metadata.keys()


def test_no_files_too_many_and_doubled_names_are_refused(registry: Registry) -> None:
    many = [pb.File(name=f"f{number}", sha256=f"{number:064x}") for number in range(257)]
    for files in ([], many, [many[0], many[0]]):
        assert registry.refused("StartUpload", files=files).reason == "FIELD_INVALID"


def test_bytes_that_are_not_the_blob_are_not_stored(registry: Registry) -> None:
    started = registry.call("StartUpload", files=file_messages({"a": BLOB}))
    wrong = bytes(len(BLOB))
    for content in (wrong, BLOB[:-1], BLOB + b"x", b""):
        messages = [header_message(started.upload_id, BLOB), pb.UploadBlobRequest(content=content)]
        error = _fails(registry, iter(messages))
        assert (error.code.name, error.reason) == ("DATA_LOSS", "DIGEST_MISMATCH")
    assert not registry.store.contains(digest(BLOB))
    registry.send("UploadBlob", blob_messages(started.upload_id, BLOB))
    assert registry.store.contains(digest(BLOB))


def test_messages_out_of_order_are_refused(registry: Registry) -> None:
    started = registry.call("StartUpload", files=file_messages({"a": BLOB}))
    header = header_message(started.upload_id, BLOB)
    for messages in ([], [pb.UploadBlobRequest(content=BLOB)], [header, header]):
        assert _fails(registry, iter(messages)).reason == "FIELD_INVALID"
    unknown = header_message(started.upload_id, OTHER)
    assert _fails(registry, iter([unknown])).metadata["field"] == "sha256"
    for upload_id in ("0" * 32, "", "x", "\x00" * 32):
        error = _fails(registry, iter([header_message(upload_id, BLOB)]))
        assert error.reason == "UPLOAD_NOT_FOUND"


def test_an_upload_that_breaks_off_leaves_nothing_and_can_be_repeated(registry: Registry) -> None:
    started = registry.call("StartUpload", files=file_messages({"a": BLOB}))
    cut = threading.Event()

    def half() -> Iterator[Any]:
        yield header_message(started.upload_id, BLOB)
        yield pb.UploadBlobRequest(content=BLOB[:1000])
        cut.wait(30)

    call = registry.stub.UploadBlob.future(half())
    call.cancel()
    cut.set()
    with pytest.raises(grpc.FutureCancelledError):
        call.result()
    assert not registry.store.contains(digest(BLOB))
    registry.send("UploadBlob", blob_messages(started.upload_id, BLOB))
    assert b"".join(registry.store.chunks(digest(BLOB))) == BLOB


def test_an_upload_of_another_tenant_does_not_exist(registry: Registry) -> None:
    started = registry.call("StartUpload", "acme", files=file_messages({"a": BLOB}))
    error = _fails(registry, blob_messages(started.upload_id, BLOB))
    assert error.reason == "UPLOAD_NOT_FOUND"


def test_register_names_a_file_that_was_not_sent(registry: Registry) -> None:
    registry.add_base()
    files = read_files(registry.adapter(1))
    started = registry.call("StartUpload", files=file_messages(files))
    fields = {"name": "sql", "base_model": BASE_NAME, "upload_id": started.upload_id}
    refused = registry.refused("RegisterAdapter", **fields)
    assert "missing: adapter_config.json" in refused.metadata["limit"]
    assert registry.refused("GetAdapter", name="sql").reason == "ADAPTER_NOT_FOUND"


def test_collection_spares_live_uploads_and_versions_and_takes_the_rest(
    registry: Registry,
) -> None:
    registry.add_base()
    published = registry.publish("sql", registry.adapter(1))
    in_use = {file.sha256 for file in published.version.manifest.files}
    registry.upload({"a": BLOB})
    collector = Collector(registry.database, registry.store)
    assert collector.collect().blobs == 0, "the upload still protects its blob"
    registry.clock.advance(registry.settings.upload_ttl_seconds + 1)
    done = collector.collect()
    assert (done.blobs, done.uploads) == (1, 1)
    assert not registry.store.contains(digest(BLOB))
    assert all(registry.store.contains(sha256) for sha256 in in_use)
    registry.call("UnregisterAdapter", name="sql", drain_seconds=1)
    assert collector.collect().blobs == 0, "a draining adapter is still served"
    registry.clock.advance(2)
    registry.server._adapters.finish_drains()
    assert collector.collect().blobs == len(in_use)
    assert not any(registry.store.contains(sha256) for sha256 in in_use)
    again = registry.publish("sql", registry.adapter(1))
    assert again.version.version == 1
    assert all(registry.store.contains(sha256) for sha256 in in_use)


def test_a_blob_that_was_lost_is_asked_for_again(registry: Registry) -> None:
    registry.add_base()
    folder = registry.adapter(1)
    weights = digest(read_files(folder)["adapter_model.safetensors"])
    registry.upload(read_files(folder))
    registry.store.delete(weights)
    with pytest.raises(LoraplexError) as caught:
        registry.publish("sql", folder)
    assert (caught.value.code.name, caught.value.reason) == ("DATA_LOSS", "DIGEST_MISMATCH")
    assert registry.publish("sql", folder).created
    assert registry.store.contains(weights)


def test_a_damaged_blob_is_never_published(tmp_path: Path) -> None:
    store = (tmp_path / "blobs").as_uri()
    with running_registry(tmp_path, sqlite_url(tmp_path), store) as registry:
        registry.add_base()
        folder = registry.adapter(1)
        registry.upload(read_files(folder))
        weights = digest(read_files(folder)["adapter_model.safetensors"])
        blob = tmp_path / "blobs" / "sha256" / weights[:2] / weights
        content = blob.read_bytes()
        for damaged in (content[:-1], content[:-1] + b"?"):
            blob.write_bytes(damaged)
            with pytest.raises(LoraplexError) as caught:
                registry.publish("sql", folder)
            assert caught.value.reason == "DIGEST_MISMATCH"
            registry.upload(read_files(folder))
        assert registry.publish("sql", folder).created


def test_scratch_of_a_killed_registry_is_discarded_by_age(tmp_path: Path) -> None:
    with running_registry(
        tmp_path, sqlite_url(tmp_path), (tmp_path / "blobs").as_uri()
    ) as registry:
        left = tmp_path / "scratch" / "loraplex-publish-x"
        left.mkdir(parents=True)
        (left / "adapter_model.safetensors").write_bytes(b"x")
        publisher = registry.server._publisher
        assert publisher.discard_scratch(3600) == 0
        assert publisher.discard_scratch(0) == 1
        assert not left.exists()


def test_an_expired_upload_cannot_be_registered(registry: Registry) -> None:
    registry.add_base()
    upload_id = registry.upload(read_files(registry.adapter(1)))
    registry.clock.advance(registry.settings.upload_ttl_seconds + 1)
    refused = registry.refused(
        "RegisterAdapter", name="sql", base_model=BASE_NAME, upload_id=upload_id
    )
    assert refused.reason == "UPLOAD_NOT_FOUND"


def test_a_deletion_that_broke_off_is_finished_by_the_next_upload(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.upload({"a": BLOB})
    registry.clock.advance(registry.settings.upload_ttl_seconds + 1)
    collector = Collector(registry.database, registry.store)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(registry.store), "delete", crash)
        with pytest.raises(KeyboardInterrupt):
            collector.collect()
    registry.upload({"a": BLOB})
    assert collector.collect().blobs == 0
    assert b"".join(registry.store.chunks(digest(BLOB))) == BLOB


class InterruptedDatabase:
    """A database that lets something happen after each of a collector's transactions."""

    def __init__(self, database: Database, happen: Callable[[], object]) -> None:
        self._database, self._happen = database, happen

    def read(self, use_case: Callable[[Transaction], Any]) -> Any:
        value = self._database.read(use_case)
        self._happen()
        return value

    def write(self, use_case: Callable[[Transaction], Any]) -> Any:
        done = self._database.write(use_case)
        self._happen()
        return done


@pytest.mark.parametrize("step", range(8))
def test_a_publish_between_any_two_steps_of_a_collection_keeps_its_blobs(
    registry: Registry, step: int
) -> None:
    """Its blobs were about to be collected: expired uploads of the same content lie there."""
    registry.add_base()
    folder = registry.adapter(1)
    registry.upload(read_files(folder))
    registry.clock.advance(registry.settings.upload_ttl_seconds + 1)
    steps = itertools.count()

    def happen() -> None:
        if next(steps) == step:
            registry.publish("sql", folder)

    database: Any = InterruptedDatabase(registry.database, happen)
    Collector(database, registry.store).collect()
    assert next(steps) > step, "the publish took place"
    for file in registry.call("GetAdapter", name="sql").current.manifest.files:
        assert len(b"".join(registry.store.chunks(file.sha256))) == file.size_bytes
    assert Collector(registry.database, registry.store).collect().blobs == 0


def test_registering_while_blobs_are_collected_never_loses_one(registry: Registry) -> None:
    """Uploads expire now and then: a register may be refused and is repeated, but a version that
    exists is whole."""
    registry.add_base()
    folders = [registry.adapter(seed) for seed in range(4)]
    collector, done = Collector(registry.database, registry.store), threading.Event()
    rng = random.Random(11)

    def collect() -> None:
        while not done.is_set():
            if rng.random() < 0.2:
                registry.clock.advance(registry.settings.upload_ttl_seconds + 1)
            collector.collect()

    def publish(number: int) -> tuple[str, set[str]]:
        refusals = set[str]()
        for _ in range(100):
            try:
                done = registry.publish(f"a{number}", folders[number % 4])
                return done.adapter.name, refusals
            except LoraplexError as error:
                refusals.add(error.reason)
        return "", refusals

    thread = threading.Thread(target=collect)
    thread.start()
    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(publish, range(8)))
    done.set()
    thread.join()
    collector.collect()
    allowed = {"UPLOAD_NOT_FOUND", "FIELD_INVALID", "DIGEST_MISMATCH"}
    assert set().union(*(refusals for _, refusals in ended)) <= allowed
    for name, _ in ended:
        manifest = registry.call("GetAdapter", name=name).current.manifest
        for file in manifest.files:
            assert len(b"".join(registry.store.chunks(file.sha256))) == file.size_bytes


def _fails(registry: Registry, messages: Iterator[Any]) -> LoraplexError:
    with pytest.raises(grpc.RpcError) as caught:
        registry.stub.UploadBlob(messages, timeout=30)
    return from_rpc_error(caught.value)
