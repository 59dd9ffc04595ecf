"""The frontend's gRPC server: Engine, health and reflection on one port."""

from __future__ import annotations

import asyncio
import errno
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine_svc.frontend.core_link import CoreLink, LinkPhase
from engine_svc.frontend.decoding import DecodingInterceptor
from engine_svc.frontend.generate import Serving
from engine_svc.frontend.inputs import PromptReader
from engine_svc.frontend.models import AdapterNames, Models
from engine_svc.frontend.observer import FrontendObserver, Observers, RequestLog
from engine_svc.frontend.servicer import EngineServicer
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.log import Log
from loraplex.channel import MAX_MESSAGE_BYTES
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc

ENGINE_SERVICE = engine_pb2.DESCRIPTOR.services_by_name["Engine"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
#: Calls that gRPC keeps until the loop takes them. Its own limit is 1,000; above that it cancels
#: without a word, so ours is where only memory could end it: admission refuses with a reason.
_MAX_UNTAKEN_CALLS = 65_536
#: How long a drain takes calls over that gRPC had before it began.
_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """`listen` is host:port, port 0 is a free one. `share_port`: other frontends listen there too,
    under a supervisor that holds the port."""

    listen: str
    base_model: str
    engine_id: str = ""
    share_port: bool = False


class FrontendServer:
    """A grpc.aio server with its health; made by `build_server`, used inside one running loop."""

    def __init__(
        self, options: FrontendOptions, serving: Serving, server: grpc.aio.Server, log: Log
    ) -> None:
        self.server = server
        self.servicer = EngineServicer(serving, options.engine_id, log)
        self._serving = serving
        self._health = health.aio.HealthServicer()
        self._tasks: set[asyncio.Task[None]] = set()
        engine_pb2_grpc.add_EngineServicer_to_server(self.servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (ENGINE_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME), server
        )
        self.port = _bind(server, options.listen)

    async def start(self) -> None:
        """Answer; health follows the link's phase from here on."""
        await self._set_health(self._serving.link.phase)
        self._serving.link.watch_phase(self._follow)
        await self.server.start()

    async def drain(self, seconds: float) -> None:
        """Let open Generate calls end, give those that remain a status, then close the port.

        The link must be DRAINING, so that new calls are refused with that reason.
        """
        self.servicer.end_watches()
        try:
            async with asyncio.timeout(seconds):
                await self.servicer.wait_idle()
                await asyncio.sleep(_SETTLE_S)
                await self.servicer.wait_idle()
        except TimeoutError:
            self.servicer.end_open_calls()
        await self.stop(grace_s=1.0)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the port; calls that are open after `grace_s` are cancelled."""
        await self.server.stop(grace_s)
        await self._serving.prompts.close()

    def _follow(self, phase: LinkPhase) -> None:
        task = asyncio.get_running_loop().create_task(self._set_health(phase))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _set_health(self, phase: LinkPhase) -> None:
        status = _SERVING if phase is LinkPhase.SERVING else _NOT_SERVING
        for service in ("", ENGINE_SERVICE):
            await self._health.set(service, status)


def build_server(
    options: FrontendOptions,
    *,
    link: CoreLink,
    names: AdapterNames,
    text: ModelText,
    log: Log,
    observers: tuple[FrontendObserver, ...] = (),
    now: Callable[[], float] = time.monotonic,
) -> FrontendServer:
    """Bind the port; must run inside the loop that will serve. `observers` hear of every request
    besides the log.

    Raises: OSError: the port is taken, or the address is not this machine's.
    """
    serving = Serving(
        link=link,
        models=Models(options.base_model, text.context_tokens, names),
        text=text,
        prompts=PromptReader(text),
        observer=Observers((RequestLog(log), *observers)),
        now=now,
    )
    server = grpc.aio.server(
        interceptors=(DecodingInterceptor(ENGINE_SERVICE),), options=_server_options(options)
    )
    return FrontendServer(options, serving, server, log)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed (about a third more messages a second), else asyncio's."""
    try:
        uvloop: Any = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _server_options(options: FrontendOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", int(options.share_port)),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.server.max_pending_requests", _MAX_UNTAKEN_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_UNTAKEN_CALLS),
        # a client that vanished without a word is noticed within 80 s
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _bind(server: grpc.aio.Server, listen: str) -> int:
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise OSError(errno.EADDRINUSE, f"cannot listen on {listen}: {error}") from error
    if port == 0:
        raise OSError(errno.EADDRINUSE, f"cannot listen on {listen}")
    return int(port)
