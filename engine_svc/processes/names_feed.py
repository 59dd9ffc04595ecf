"""Names from the loader to every frontend: a snapshot at first, then each change.

The feed opens once, when the loader has caught up with the registry and found its base model to be
the registered one; until then a frontend that connects hears nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from engine_svc.messages import FrontendHello, NamesChanged
from engine_svc.names import NameMap, NameMapUpdate
from engine_svc.processes.socket import Channel, Peer, keep_connected


class NamesFeed:
    """The loader's own map and the frontends that follow it; threads may share it."""

    def __init__(self) -> None:
        self._map = NameMap()
        self._peers: set[Peer] = set()
        self._open = False
        self._lock = threading.Lock()

    @property
    def revision(self) -> int:
        return self._map.revision

    @property
    def is_open(self) -> bool:
        return self._open

    def apply(self, update: NameMapUpdate) -> None:
        with self._lock:
            if self._map.apply(update) and self._open:
                self._send(NamesChanged(update))

    def open(self) -> bool:
        """Begin to serve. Returns: whether it was closed before."""
        with self._lock:
            was_open, self._open = self._open, True
            if not was_open:
                self._send(NamesChanged(self._map.snapshot()))
            return not was_open

    def attach(self, peer: Peer) -> None:
        with self._lock:
            self._peers.add(peer)
            if self._open:
                peer.put(NamesChanged(self._map.snapshot()))

    def detach(self, peer: Peer) -> None:
        with self._lock:
            self._peers.discard(peer)

    def _send(self, message: NamesChanged) -> None:
        for peer in tuple(self._peers):
            if peer.is_stalled():
                self._peers.discard(peer)
                peer.close()
            else:
                peer.put(message)


class NamesReceiver:
    """A frontend's thread that applies what the feed says, in the loop; connects again for ever."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: str,
        authkey: bytes,
        hello: FrontendHello,
        apply: Callable[[NameMapUpdate], object],
    ) -> None:
        self._loop, self._apply = loop, apply
        self._stopping = threading.Event()
        threading.Thread(
            target=keep_connected,
            args=(path, authkey, hello, self._stopping, self._receive),
            name="names",
            daemon=True,
        ).start()

    def stop(self) -> None:
        self._stopping.set()

    def _receive(self, channel: Channel) -> None:
        while True:
            message = channel.receive()
            if isinstance(message, NamesChanged):
                try:
                    self._loop.call_soon_threadsafe(self._apply, message.update)
                except RuntimeError:  # the loop is closed: the process ends
                    self._stopping.set()
                    return
