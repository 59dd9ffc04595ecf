"""Message channels over Unix sockets: pickled frozen dataclasses, authenticated by a shared key.

Sockets lie in a short private folder, because a Unix socket's path has at most 107 bytes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Protocol

#: Messages that may wait for a slow reader before its time runs.
OUTBOX_CAPACITY = 256
#: Seconds that a reader's outbox may stay full before the reader is declared dead.
STALL_SECONDS = 1.0
_RETRY_SECONDS = 0.05


class ChannelClosed(Exception):
    """The peer is gone, or this end was closed."""


class Channel:
    """One connection. `send` and `receive` may be used from different threads, each from one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._closing = threading.Lock()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: object) -> None:
        """Raises: ChannelClosed."""
        try:
            self._connection.send(message)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> Any:
        """Wait for the next message. Raises: ChannelClosed."""
        try:
            return self._connection.recv()
        except (OSError, EOFError, TypeError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    def close(self) -> None:
        """Ends both directions and wakes threads that wait in `send` or `receive`."""
        with self._closing:
            if self._connection.closed:
                return
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(self._connection.fileno())) as raw,
            ):
                raw.shutdown(socket.SHUT_RDWR)
            self._connection.close()


class Peer(Protocol):
    """Where the core loop and the loader put messages: never blocks."""

    def put(self, message: object) -> None: ...

    def is_stalled(self) -> bool:
        """It has not read for STALL_SECONDS although its outbox was full."""
        ...

    def close(self) -> None: ...


class Outbox:
    """Messages to one channel, sent in order by a thread of its own.

    `put` never blocks and loses nothing: what exceeds the capacity is kept while the reader has
    STALL_SECONDS to catch up; after that `is_stalled` is true and its owner closes it.
    """

    def __init__(
        self,
        channel: Channel,
        capacity: int = OUTBOX_CAPACITY,
        stall_s: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._capacity = capacity
        self._stall_s = stall_s
        self._clock = clock
        self._messages: deque[object] = deque()
        self._full_since: float | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._writer.start()

    def put(self, message: object) -> None:
        with self._changed:
            if self._closed:
                return
            self._messages.append(message)
            if len(self._messages) > self._capacity and self._full_since is None:
                self._full_since = self._clock()
            self._changed.notify()

    def is_stalled(self) -> bool:
        full_since = self._full_since
        return full_since is not None and self._clock() - full_since >= self._stall_s

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._messages.clear()
            self._changed.notify()
        self._channel.close()

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._messages and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                message = self._messages[0]
            try:
                self._channel.send(message)
            except ChannelClosed:
                self.close()
                return
            with self._changed:
                if self._messages:
                    self._messages.popleft()
                if len(self._messages) <= self._capacity:
                    self._full_since = None


def make_socket_dir() -> str:
    """A new folder that only this user can enter, with a short path."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(parent) <= 60:
            return tempfile.mkdtemp(prefix="lpx-", dir=parent)
    raise AssertionError("unreachable: /tmp is short")


def serve(path: str, authkey: bytes, accepted: Callable[[Channel], None]) -> Callable[[], None]:
    """Accept connections on a thread and give each to `accepted` on a thread of its own.

    Returns: a call that stops accepting.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = Listener(path, "AF_UNIX", backlog=64, authkey=authkey)
    stopped = threading.Event()

    def accept() -> None:
        while not stopped.is_set():
            try:
                channel = Channel(listener.accept())
            except (AuthenticationError, EOFError, ConnectionError):
                continue
            except OSError:
                return
            threading.Thread(target=accepted, args=(channel,), name="peer", daemon=True).start()

    def stop() -> None:
        stopped.set()
        listener.close()

    threading.Thread(target=accept, name="accept", daemon=True).start()
    return stop


def connect(path: str, authkey: bytes, should_stop: Callable[[], bool]) -> Channel:
    """Connect, trying again until somebody listens. Raises: ChannelClosed once `should_stop`."""
    while not should_stop():
        try:
            return Channel(Client(path, "AF_UNIX", authkey=authkey))
        except (OSError, EOFError, AuthenticationError):
            time.sleep(_RETRY_SECONDS)
    raise ChannelClosed(f"gave up connecting to {path}")


def keep_connected(
    path: str,
    authkey: bytes,
    hello: object,
    stopping: threading.Event,
    use: Callable[[Channel], None],
) -> None:
    """Connect, greet, `use` the channel until it raises ChannelClosed; again until `stopping`."""
    while not stopping.is_set():
        with contextlib.suppress(ChannelClosed):
            channel = connect(path, authkey, stopping.is_set)
            try:
                channel.send(hello)
                use(channel)
            finally:
                channel.close()
