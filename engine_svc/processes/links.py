"""The core as a frontend sees it (engine_svc.frontend.core_link.CoreLink), over a socket or not.

`FrontendLink` belongs to one asyncio loop. `SocketTransport` connects it to the core's process and
connects again after the core has died; `LocalPeer` joins it to a CoreLoop in the same process.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from engine_svc.frontend.core_link import LinkPhase, OutputStream
from engine_svc.frontend.router import OutputRouter
from engine_svc.messages import (
    Cancel,
    CoreHello,
    ExplainAnswer,
    ExplainRequest,
    FrontendHello,
    SnapshotAnswer,
    SnapshotRequest,
    StopChoice,
    Submit,
)
from engine_svc.processes.socket import Channel, Outbox, Peer, keep_connected
from engine_svc.snapshots import CoreSnapshot, RequestExplanation
from engine_svc.types import Request, StepOutputs
from loraplex.status import Unavailable

SNAPSHOT_SECONDS = 10.0


class FrontendLink:
    """Sends requests to the core that is connected, and routes what it answers.

    The phase is SERVING while a core is connected and the names were complete once, until `drain`.
    """

    def __init__(self) -> None:
        self.router = OutputRouter(self._send_cancel, time.monotonic)
        self._core: Peer | None = None
        self.hello: CoreHello | None = None
        self._names_ready = False
        self._draining = False
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}

    # ---- CoreLink

    @property
    def phase(self) -> LinkPhase:
        return self.router.phase

    def watch_phase(self, callback: Callable[[LinkPhase], None]) -> None:
        self.router.watch_phase(callback)

    def submit(self, request: Request) -> OutputStream:
        stream = self.router.open(request.request_id)
        self._send(Submit(request))
        return stream

    def cancel(self, request_id: str) -> None:
        if self.router.close(request_id):
            self._send_cancel(request_id)

    def stop_choice(self, request_id: str, choice: int, keep_tokens: int) -> None:
        self._send(StopChoice(request_id, choice, keep_tokens))

    async def snapshot(self) -> CoreSnapshot:
        answer: CoreSnapshot = await self._ask(SnapshotRequest)
        return answer

    async def explain(self, request_id: str) -> RequestExplanation | None:
        answer: RequestExplanation | None = await self._ask(
            lambda ticket: ExplainRequest(ticket, request_id)
        )
        return answer

    async def _ask(self, question: Callable[[int], object]) -> Any:
        """Send `question` under a new ticket and wait for its answer."""
        if self._core is None:
            raise _no_core()
        ticket = next(self._tickets)
        answer = asyncio.get_running_loop().create_future()
        self._asked[ticket] = answer
        self._send(question(ticket))
        try:
            return await asyncio.wait_for(answer, SNAPSHOT_SECONDS)
        except TimeoutError:
            raise _no_core() from None
        finally:
            self._asked.pop(ticket, None)

    # ---- called by the transport and the process, in the loop

    def connected(self, hello: CoreHello | None, core: Peer) -> None:
        """`hello` is None when the core is in this process."""
        self.hello, self._core = hello, core
        self._set_phase()

    def lost(self) -> None:
        """The core is gone: open requests end ENGINE_LOST."""
        self._core = None
        self.router.lose_core()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(_no_core())
        self._set_phase()

    def names_ready(self) -> None:
        """The name map has been complete once."""
        self._names_ready = True
        self._set_phase()

    def drain(self) -> None:
        """From now on only what is open."""
        self._draining = True
        self._set_phase()

    def receive(self, message: object) -> None:
        match message:
            case StepOutputs():
                self.router.deliver(message.items)
            case SnapshotAnswer(ticket, answer) | ExplainAnswer(ticket, answer):
                waiting = self._asked.get(ticket)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)

    def _set_phase(self) -> None:
        if self._draining:
            phase = LinkPhase.DRAINING
        elif self._core is not None and self._names_ready:
            phase = LinkPhase.SERVING
        else:
            phase = LinkPhase.STARTING
        self.router.set_phase(phase)

    def _send(self, message: object) -> None:
        if self._core is not None:
            self._core.put(message)

    def _send_cancel(self, request_id: str) -> None:
        self._send(Cancel(request_id))


class SocketTransport:
    """A thread that keeps a FrontendLink connected to the core behind `path`."""

    def __init__(
        self,
        link: FrontendLink,
        loop: asyncio.AbstractEventLoop,
        path: str,
        authkey: bytes,
        hello: FrontendHello,
    ) -> None:
        self._link, self._loop = link, loop
        self._stopping = threading.Event()
        threading.Thread(
            target=keep_connected,
            args=(path, authkey, hello, self._stopping, self._use),
            name="core-link",
            daemon=True,
        ).start()

    def stop(self) -> None:
        self._stopping.set()

    def _use(self, channel: Channel) -> None:
        hello = channel.receive()
        outbox = Outbox(channel)
        self._call(self._link.connected, hello, outbox)
        try:
            while True:
                self._call(self._link.receive, channel.receive())
        finally:
            outbox.close()
            self._call(self._link.lost)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: the process ends
            self._stopping.set()


class LocalPeer:
    """A CoreLoop's peer in the same process: messages go to the link's loop."""

    def __init__(self, link: FrontendLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link, self._loop = link, loop

    def put(self, message: object) -> None:
        self._loop.call_soon_threadsafe(self._link.receive, message)

    def is_stalled(self) -> bool:
        return False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._link.lost)


def _no_core() -> Unavailable:
    return Unavailable(
        "the engine's core is not running; try again soon", reason="STARTING", retry_after_s=1.0
    )
