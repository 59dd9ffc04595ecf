"""The Engine service of engine.proto, over a CoreLink and a replica of the registry's names."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any, NoReturn

from engine_svc.frontend.core_link import LinkPhase, require_serving
from engine_svc.frontend.errors import mapped
from engine_svc.frontend.generate import GenerateCall, Serving
from engine_svc.frontend.models import tenant_of
from engine_svc.frontend.state import engine_state, explained
from engine_svc.log import Log
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import FieldInvalid, NotFound, Unavailable, Unimplemented
from loraplex.tenants import TENANT_METADATA

_DEFAULT_INTERVAL_S = 1.0
_MIN_INTERVAL_S = 0.1
_MAX_INTERVAL_S = 3600.0


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Thin: each method reads its request, asks, and answers."""

    def __init__(self, serving: Serving, engine_id: str, log: Log) -> None:
        self.log = log
        self._serving = serving
        self._engine_id = engine_id
        self._calls: set[GenerateCall] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Event()

    async def wait_idle(self) -> None:
        """Until no Generate call is open."""
        await self._idle.wait()

    def end_watches(self) -> None:
        """The drain begins: streams of engine state get a status."""
        self._closing.set()

    def end_open_calls(self) -> None:
        """The drain's time is over: each open Generate call gets a status."""
        for call in tuple(self._calls):
            call.cut(
                _draining("the engine shut down before this answer was complete; send it again")
            )

    # grpc.aio takes coroutines that write for server streams; the stubs know generators only
    @mapped
    async def Generate(  # type: ignore[override]
        self, request: engine_pb2.GenerateRequest, context: Any
    ) -> None:
        call = GenerateCall(self._serving, context)
        self._calls.add(call)
        self._idle.clear()
        try:
            await call.run(request)
        finally:
            self._calls.discard(call)
            if not self._calls:
                self._idle.set()

    @mapped
    async def ListModels(
        self, request: engine_pb2.ListModelsRequest, context: Any
    ) -> engine_pb2.ListModelsResponse:
        tenant = _tenant(context)
        if self._serving.link.phase is LinkPhase.STARTING:
            # the names may not be complete yet: no list is better than half of it
            require_serving(LinkPhase.STARTING)
        return self._serving.models.page(request, tenant)

    @mapped
    async def GetEngineState(
        self, request: engine_pb2.GetEngineStateRequest, context: Any
    ) -> engine_pb2.GetEngineStateResponse:
        return engine_pb2.GetEngineStateResponse(state=await self._state())

    @mapped
    async def WatchEngineState(  # type: ignore[override]
        self, request: engine_pb2.WatchEngineStateRequest, context: Any
    ) -> None:
        interval_s = request.interval_s or _DEFAULT_INTERVAL_S
        if not (math.isfinite(interval_s) and _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S):
            limit = f"0 (= {_DEFAULT_INTERVAL_S:g}) or in [{_MIN_INTERVAL_S}, {_MAX_INTERVAL_S:g}]"
            raise FieldInvalid("interval_s", interval_s, limit)
        while not self._closing.is_set():
            state = await self._state()
            await context.write(engine_pb2.WatchEngineStateResponse(state=state))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._closing.wait()
        raise _draining("the engine is shutting down; watch another one")

    @mapped
    async def WarmAdapter(self, request: engine_pb2.WarmAdapterRequest, context: Any) -> NoReturn:
        raise _not_served("WarmAdapter")

    @mapped
    async def PinAdapter(self, request: engine_pb2.PinAdapterRequest, context: Any) -> NoReturn:
        raise _not_served("PinAdapter")

    @mapped
    async def UnpinAdapter(self, request: engine_pb2.UnpinAdapterRequest, context: Any) -> NoReturn:
        raise _not_served("UnpinAdapter")

    @mapped
    async def Explain(
        self, request: engine_pb2.ExplainRequest, context: Any
    ) -> engine_pb2.ExplainResponse:
        if not request.request_id:
            raise FieldInvalid("request_id", "''", "the id of an open request")
        found = await self._serving.link.explain(request.request_id)
        asking = _named_tenant(context)
        if found is None or asking not in ("", found.flow.flow.tenant):
            raise NotFound(
                f"this engine has no open request {request.request_id!r}; it has ended, or another "
                "engine has it",
                reason="REQUEST_NOT_FOUND",
                metadata={"request_id": request.request_id},
            )
        return explained(found)

    async def _state(self) -> engine_pb2.EngineState:
        models = self._serving.models
        return engine_state(
            await self._serving.link.snapshot(),
            engine_id=self._engine_id,
            base_model=models.base_model,
            registry_revision=models.revision,
        )


def _tenant(context: Any) -> str:
    return tenant_of(context.invocation_metadata())


def _named_tenant(context: Any) -> str:
    """The tenant that a caller says it is, who sees no other's request; empty: it says nothing."""
    named = {key for key, _ in context.invocation_metadata() or ()}
    return _tenant(context) if TENANT_METADATA in named else ""


def _draining(message: str) -> Unavailable:
    return Unavailable(message, reason="DRAINING", retry_after_s=1.0)


def _not_served(method: str) -> Unimplemented:
    return Unimplemented(
        f"{method} is declared but not served by this build; adapters load when they are asked for",
        metadata={"method": method},
    )
