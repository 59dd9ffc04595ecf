"""A registry inside the test's process, over real gRPC.

The fixtures that start it are in registry_fixtures.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from loraplex.blobs import BlobStore, open_blob_store
from loraplex.channel import insecure_channel
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc
from loraplex.status import LoraplexError, from_rpc_error
from registry_svc.database import Database, utc_now
from registry_svc.migrating import is_empty, migrate
from registry_svc.server import RegistryServer
from registry_svc.settings import Settings, read_settings
from tests.support.tiny_adapters import BASE_NAME, CONFIG, write_adapter

CALL_TIMEOUT_S = 60.0


@dataclass
class MovableClock:
    """The real time plus what a test adds."""

    offset: dt.timedelta = field(default_factory=dt.timedelta)

    def __call__(self) -> dt.datetime:
        return utc_now() + self.offset

    def advance(self, seconds: float) -> None:
        self.offset += dt.timedelta(seconds=seconds)


@dataclass
class Registry:
    """A running server, its parts, and calls whose failures are errors of loraplex.status."""

    address: str
    settings: Settings
    database: Database
    store: BlobStore
    clock: MovableClock
    folder: Path
    server: RegistryServer
    stub: registry_pb2_grpc.AdapterRegistryStub

    def call(self, method: str, as_tenant: str = "", **fields: Any) -> Any:
        """One RPC with these request fields."""
        request = getattr(pb, f"{method}Request")(**fields)
        return self.send(method, request, as_tenant)

    def send(self, method: str, request: Any, tenant: str = "") -> Any:
        metadata = [("x-loraplex-tenant", tenant)] if tenant else []
        try:
            rpc = getattr(self.stub, method)
            return rpc(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def refused(self, method: str, as_tenant: str = "", **fields: Any) -> LoraplexError:
        """The error of a call that must fail."""
        with pytest.raises(LoraplexError) as caught:
            self.call(method, as_tenant, **fields)
        return caught.value

    def add_base(self, name: str = BASE_NAME, aliases: tuple[str, ...] = ("org/tiny",)) -> Any:
        model = base_message(name, aliases)
        return self.call("RegisterBaseModel", base_model=model)

    def adapter(self, seed: int = 0, **options: Any) -> Path:
        """A PEFT folder of its own."""
        folder = self.folder / f"adapter-{seed}-{len(list(self.folder.iterdir()))}"
        return write_adapter(folder, seed=seed, **options)

    def upload(self, files: dict[str, bytes], tenant: str = "") -> str:
        """Send what is missing of these files. Returns: the upload's id."""
        started = self.call("StartUpload", tenant, files=file_messages(files))
        missing = set(started.missing_sha256)
        for content in files.values():
            if digest(content) in missing:
                missing.discard(digest(content))
                self.send("UploadBlob", blob_messages(started.upload_id, content), tenant)
        return str(started.upload_id)

    def publish(self, name: str, folder: Path, tenant: str = "", **fields: Any) -> Any:
        """Upload a folder's two files and register them."""
        fields.setdefault("base_model", BASE_NAME)
        upload_id = self.upload(read_files(folder), tenant)
        return self.call("RegisterAdapter", tenant, name=name, upload_id=upload_id, **fields)


@contextlib.contextmanager
def running_registry(folder: Path, url: str, store_url: str, *flags: str) -> Iterator[Registry]:
    settings = read_settings(
        ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--database-url", url,
         "--blob-store", store_url, "--scratch-dir", str(folder / "scratch"),
         "--drain-seconds", "0.5", "--gc-interval-seconds", "0", *flags],
        {},
    )  # fmt: skip
    clock = MovableClock()
    database = Database(url, clock)
    if is_empty(database):
        migrate(database)
    store = open_blob_store(store_url, settings.s3_endpoint_url)
    server = RegistryServer(settings, database, store)
    addresses = server.start()
    sources = folder / "adapters"
    sources.mkdir()
    with insecure_channel(addresses.grpc) as channel:
        stub = registry_pb2_grpc.AdapterRegistryStub(channel)
        try:
            yield Registry(addresses.grpc, settings, database, store, clock, sources, server, stub)
        finally:
            server.stop()


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def sqlite_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'registry.db'}"


def base_message(name: str = BASE_NAME, aliases: tuple[str, ...] = (), **config: Any) -> Any:
    return pb.BaseModel(
        name=name,
        weights_digest="sha256:" + hashlib.sha256(name.encode()).hexdigest(),
        aliases=aliases,
        config_json=json.dumps({**CONFIG, **config}),
        eos_token_ids=[2],
    )


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_files(folder: Path) -> dict[str, bytes]:
    names = ("adapter_config.json", "adapter_model.safetensors")
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}


def file_messages(files: dict[str, bytes]) -> list[Any]:
    return [
        pb.File(name=name, size_bytes=len(content), sha256=digest(content))
        for name, content in files.items()
    ]


def blob_messages(upload_id: str, content: bytes, chunk: int = 1000) -> Iterator[Any]:
    yield header_message(upload_id, content)
    for start in range(0, len(content), chunk):
        yield pb.UploadBlobRequest(content=content[start : start + chunk])


def header_message(upload_id: str, content: bytes) -> Any:
    header = pb.UploadBlobRequest.Header(
        upload_id=upload_id, sha256=digest(content), size_bytes=len(content)
    )
    return pb.UploadBlobRequest(header=header)
