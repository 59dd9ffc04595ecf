"""registryctl's side of the connection."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from loraplex.adapter_format import FolderFile, read_folder
from loraplex.adapter_format.check import hash_file
from loraplex.channel import insecure_channel
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc
from loraplex.status import FieldInvalid, Unavailable, from_rpc_error
from loraplex.tenants import tenant_metadata

DEFAULT_ADDRESS = "127.0.0.1:50051"
ADDRESS_VARIABLE = "LORAPLEX_REGISTRY_ADDRESS"
CHUNK_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Uploaded:
    upload_id: str
    sent_files: int
    sent_bytes: int
    not_stored: tuple[str, ...]


class Client:
    """Calls the registry; every failure is an error of loraplex.status."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.address = arguments.address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        self._timeout_s = arguments.timeout
        self._metadata = tenant_metadata(arguments.tenant)
        self._channel = insecure_channel(self.address)
        self._stub = registry_pb2_grpc.AdapterRegistryStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, method: str, request: Any) -> Any:
        """One RPC within --timeout. Raises: LoraplexError."""
        try:
            return getattr(self._stub, method)(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def watch(self, from_revision: int) -> Iterator[pb.WatchAdaptersResponse]:
        """Until the server ends it. Raises: LoraplexError."""
        request = pb.WatchAdaptersRequest(from_revision=from_revision)
        try:
            yield from self._stub.WatchAdapters(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def upload(self, folder: Path) -> Uploaded:
        """Send the files of an adapter folder that the store lacks.

        Raises: AdapterRefused: no adapter folder; LoraplexError.
        """
        found = read_folder(folder)
        hashed = {file.name: hash_file(file.name, file.path) for file in found.stored}
        files = [
            pb.File(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256)
            for file in hashed.values()
        ]
        started = self.call("StartUpload", pb.StartUploadRequest(files=files))
        missing, sent_bytes, sent_files = set(started.missing_sha256), 0, 0
        for file in found.stored:
            entry = hashed[file.name]
            if entry.sha256 in missing:
                missing.discard(entry.sha256)
                header = pb.UploadBlobRequest.Header(
                    upload_id=started.upload_id, sha256=entry.sha256, size_bytes=entry.size_bytes
                )
                self.call("UploadBlob", _messages(header, file))
                sent_bytes, sent_files = sent_bytes + entry.size_bytes, sent_files + 1
        left = tuple(f"{name}: {reason}" for name, reason in found.not_stored)
        return Uploaded(started.upload_id, sent_files, sent_bytes, left)

    def _failure(self, error: grpc.RpcError) -> Exception:
        failure = from_rpc_error(error)
        if isinstance(failure, Unavailable) and "loraplex" not in str(error.trailing_metadata()):
            return Unavailable(
                f"no registry answers at {self.address} ({failure.message});"
                f" set --address or {ADDRESS_VARIABLE}",
                reason="REGISTRY_UNREACHABLE",
            )
        return failure


def _messages(
    header: pb.UploadBlobRequest.Header, file: FolderFile
) -> Iterator[pb.UploadBlobRequest]:
    yield pb.UploadBlobRequest(header=header)
    with file.path.open("rb") as stream:
        while content := stream.read(CHUNK_BYTES):
            yield pb.UploadBlobRequest(content=content)


def read_labels(pairs: list[str]) -> dict[str, str]:
    """Raises: FieldInvalid: not key=value."""
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise FieldInvalid("--label", pair, "key=value")
        labels[key] = value
    return labels
