"""A watcher of the registry, as an engine is one: events as they come, in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

import grpc

from loraplex.channel import insecure_channel
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc

TIMEOUT_S = 60.0


class Watcher:
    """Entered once it has caught up from the beginning; the events on the way are forgotten.

    Raises: grpc.RpcError when the stream breaks, queue.Empty after TIMEOUT_S of silence.
    """

    def __init__(self, address: str) -> None:
        self._channel = insecure_channel(address)
        self._found: queue.Queue[pb.WatchAdaptersResponse | grpc.RpcError] = queue.Queue()

    def __enter__(self) -> Watcher:
        stub = registry_pb2_grpc.AdapterRegistryStub(self._channel)
        self._call = stub.WatchAdapters(pb.WatchAdaptersRequest(from_revision=0))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        while self._next().HasField("event"):
            continue
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.cancel()
        self._thread.join(TIMEOUT_S)
        self._channel.close()

    def wait_for(self, is_wanted: Callable[[pb.Event], bool]) -> pb.Event:
        """The next event that satisfies the condition."""
        while True:
            message = self._next()
            if message.HasField("event") and is_wanted(message.event):
                return message.event

    def _next(self) -> pb.WatchAdaptersResponse:
        message = self._found.get(timeout=TIMEOUT_S)
        if isinstance(message, grpc.RpcError):
            raise message
        return message

    def _read(self) -> None:
        try:
            for message in self._call:
                self._found.put(message)
        except grpc.RpcError as error:
            self._found.put(error)
