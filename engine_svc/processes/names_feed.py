"""Names from the loader to every frontend: a snapshot at first, then each change.

The feed opens once, when the loader has caught up with the registry and found its base model to be
the registered one; until then a frontend that connects hears nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

from engine_svc.messages import FrontendHello, NamesChanged, NamesStale
from engine_svc.names import NameMap, NameMapUpdate
from engine_svc.processes.socket import Channel, Peer, keep_connected
from engine_svc.shares import Shares, shares_of
from engine_svc.types import TenantQuota


class NamesFeed:
    """The loader's own map and the frontends that follow it; threads may share it."""

    def __init__(self, quota: TenantQuota | None = None) -> None:
        """`quota`: the queue limits of a tenant that has none of its own."""
        self._map = NameMap()
        self._quota = quota
        self._peers: set[Peer] = set()
        self._open = False
        self._stale = False
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

    def shares(self) -> Shares:
        """Weights and queue limits as of `revision`."""
        with self._lock:
            return shares_of(self._map, self._quota)

    def open(self) -> bool:
        """Begin to serve. Returns: whether it was closed before."""
        with self._lock:
            was_open, self._open = self._open, True
            if not was_open:
                self._send(NamesChanged(self._map.snapshot()))
                self._send(NamesStale(self._stale))
            return not was_open

    def set_stale(self, is_stale: bool) -> None:
        """Also while it is closed: a frontend may hold names from the loader before this one."""
        with self._lock:
            self._stale = is_stale
            self._send(NamesStale(is_stale))

    def attach(self, peer: Peer) -> None:
        with self._lock:
            self._peers.add(peer)
            if self._open:
                peer.put(NamesChanged(self._map.snapshot()))
            if self._open or self._stale:
                peer.put(NamesStale(self._stale))

    def detach(self, peer: Peer) -> None:
        with self._lock:
            self._peers.discard(peer)

    def _send(self, message: NamesChanged | NamesStale) -> None:
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
        stale: Callable[[bool], object] = lambda is_stale: None,
    ) -> None:
        self._loop, self._apply, self._stale = loop, apply, stale
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
            match channel.receive():
                case NamesChanged(update):
                    heard = partial(self._apply, update)
                case NamesStale(is_stale):
                    heard = partial(self._stale, is_stale)
                case _:
                    continue
            try:
                self._loop.call_soon_threadsafe(heard)
            except RuntimeError:  # the loop is closed: the process ends
                self._stopping.set()
                return
