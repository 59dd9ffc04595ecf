"""Bytes that are no request of the RPC they were sent to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from loraplex.channel import insecure_channel
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.status import from_rpc_error
from registry_svc.server import SERVICE
from tests.support.registry_service import Registry, running_registry, sqlite_url

BAD = b"\xff\xff\xff"


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    store = f"file://{tmp_path / 'blobs'}"
    with running_registry(tmp_path, sqlite_url(tmp_path), store) as found:
        yield found


@pytest.mark.parametrize("method", ["GetAdapter", "RegisterAdapter", "WatchAdapters", "UploadBlob"])
def test_bytes_that_are_no_request_are_refused(method: str, registry: Registry) -> None:
    path = f"/{SERVICE}/{method}"
    with insecure_channel(registry.address) as channel:
        send = {
            "UploadBlob": lambda: channel.stream_unary(path)(iter([BAD]), timeout=30),
            "WatchAdapters": lambda: next(channel.unary_stream(path)(BAD, timeout=30)),
        }.get(method, lambda: channel.unary_unary(path)(BAD, timeout=30))
        with pytest.raises(grpc.RpcError) as caught:
            send()
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert error.metadata["field"] == "request"


def test_a_bad_message_in_mid_upload_ends_the_upload(registry: Registry) -> None:
    files = [pb.File(name="adapter_config.json", size_bytes=3, sha256="0" * 64)]
    header = pb.UploadBlobRequest.Header(sha256="0" * 64, size_bytes=3)
    header.upload_id = registry.call("StartUpload", files=files).upload_id
    messages = [pb.UploadBlobRequest(header=header).SerializeToString(), BAD]
    with insecure_channel(registry.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.stream_unary(f"/{SERVICE}/UploadBlob")(iter(messages), timeout=30)
    assert from_rpc_error(caught.value).metadata["field"] == "request"
