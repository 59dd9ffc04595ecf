"""The stream of one upload: pieces, order, and a client that falls silent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.status import FieldInvalid
from registry_svc.receive import MAX_CONTENT_BYTES, BlobReader, read_header


class FakeContext:
    """A call that can be cancelled."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


def _content(data: bytes) -> Any:
    return pb.UploadBlobRequest(content=data)


def test_pieces_come_in_any_size() -> None:
    messages = iter([_content(b"abc"), _content(b""), _content(b"defg")])
    with BlobReader(messages, FakeContext(), 60) as reader:
        assert [reader.read(2) for _ in range(5)] == [b"ab", b"c", b"de", b"fg", b""]


def test_a_silent_client_is_cut_off() -> None:
    context = FakeContext()

    def silent() -> Iterator[Any]:
        yield _content(b"a")
        assert context.cancelled.wait(30)

    with BlobReader(silent(), context, 0.02) as reader:
        assert reader.read(10) == b"a"
        assert reader.read(10) == b""
    assert context.cancelled.is_set()


def test_a_message_above_the_limit_or_a_second_header_is_refused() -> None:
    header = pb.UploadBlobRequest(header=pb.UploadBlobRequest.Header(upload_id="u"))
    for bad in (_content(bytes(MAX_CONTENT_BYTES + 1)), header, pb.UploadBlobRequest()):
        with BlobReader(iter([bad]), FakeContext(), 60) as reader, pytest.raises(FieldInvalid):
            reader.read(1)
    reader = BlobReader(iter([_content(b"x")]), FakeContext(), 60)
    with pytest.raises(FieldInvalid):
        read_header(reader)
