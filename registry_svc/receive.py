"""The messages of one UploadBlob call as a readable stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.status import FieldInvalid
from loraplex.undecodable import Undecodable

MAX_CONTENT_BYTES = 1024 * 1024


class BlobReader:
    """Reads content messages; cancels the call when none comes for `idle_s` seconds, so that a
    client that went away does not keep a worker."""

    def __init__(self, requests: Iterator[Any], context: Any, idle_s: float) -> None:
        self._requests, self._context, self._idle_s = requests, context, idle_s
        self._left = memoryview(b"")
        self._timer: threading.Timer | None = None

    def __enter__(self) -> BlobReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop_timer()

    def next_message(self) -> Any | None:
        """The next message, None at the end. Raises: FieldInvalid: bytes that are no message."""
        self._timer = threading.Timer(self._idle_s, self._context.cancel)
        self._timer.daemon = True
        self._timer.start()
        try:
            message = next(self._requests, None)
        finally:
            self._stop_timer()
        if isinstance(message, Undecodable):
            raise message.refusal()
        return message

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes of what has come; empty at the end of the stream."""
        while not self._left:
            message = self.next_message()
            if message is None:
                return b""
            if message.WhichOneof("part") != "content":
                raise FieldInvalid("part", message.WhichOneof("part"), "content after the header")
            if len(message.content) > MAX_CONTENT_BYTES:
                raise FieldInvalid("content", f"{len(message.content)} bytes", "at most 1 MiB")
            self._left = memoryview(message.content)
        piece, self._left = bytes(self._left[:size]), self._left[size:]
        return piece

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def read_header(reader: BlobReader) -> pb.UploadBlobRequest.Header:
    """Raises: FieldInvalid: the first message is no header."""
    message = reader.next_message()
    if message is None or message.WhichOneof("part") != "header":
        shown = "nothing" if message is None else message.WhichOneof("part")
        raise FieldInvalid("part", shown, "header in the first message")
    header: pb.UploadBlobRequest.Header = message.header
    return header
