"""The frontend's process: gRPC and text on one asyncio loop; core and loader behind sockets."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from engine_svc.frontend.core_link import LinkPhase
from engine_svc.frontend.server import FrontendOptions, build_server, new_event_loop
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.messages import ChildNotReady, ChildReady, FrontendHello
from engine_svc.names import NameMap, NameMapUpdate
from engine_svc.observing import RequestMetrics
from engine_svc.processes.child import Child
from engine_svc.processes.links import FrontendLink, SocketTransport
from engine_svc.processes.names_feed import NamesReceiver
from loraplex.base_folder import find_base_folder


def run(child: Child) -> None:
    """Serve until the supervisor says otherwise. Raises: LoraplexError: the model's text."""
    loop = new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_Frontend(child).run())


class _Frontend:
    def __init__(self, child: Child) -> None:
        self._child = child
        self._link = FrontendLink()
        self._names = NameMap()
        self._drain_seconds = asyncio.get_event_loop().create_future()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._child.watch(
            lambda seconds: self._from_thread(loop, seconds),
            lambda: self._from_thread(loop, 0.0),
        )
        signal.signal(signal.SIGTERM, lambda *_: self._from_thread(loop, 0.0))
        boot = self._child.boot
        settings = boot.settings
        text = ModelText.load(find_base_folder(settings.model), settings.max_model_len)
        server = build_server(
            FrontendOptions(boot.listen, settings.base_model_name, boot.engine_id, share_port=True),
            link=self._link,
            names=self._names,
            text=text,
            log=self._child.log,
            observers=(RequestMetrics(settings.max_adapter_series),),
        )
        await server.start()
        self._link.watch_phase(self._tell)
        hello = FrontendHello(boot.index, os.getpid())
        sockets = Path(boot.socket_dir)
        transport = SocketTransport(self._link, loop, str(sockets / "core"), boot.authkey, hello)
        receiver = NamesReceiver(
            loop, str(sockets / "loader"), boot.authkey, hello, self._apply_names, self._set_stale
        )
        seconds = await self._drain_seconds
        self._link.drain()
        await server.drain(seconds)
        transport.stop()
        receiver.stop()

    def _apply_names(self, update: NameMapUpdate) -> None:
        if self._names.apply(update):
            self._link.names_ready()

    def _set_stale(self, is_stale: bool) -> None:
        self._names.is_stale = is_stale

    def _tell(self, phase: LinkPhase) -> None:
        if phase is LinkPhase.SERVING:
            self._child.tell(ChildReady({"address": self._child.boot.listen}))
        elif phase is LinkPhase.STARTING:
            self._child.tell(ChildNotReady("the core is not connected"))

    def _from_thread(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        loop.call_soon_threadsafe(self._stop, seconds)

    def _stop(self, seconds: float) -> None:
        if not self._drain_seconds.done():
            self._drain_seconds.set_result(seconds)
