"""A frontend on a real loopback socket over a FakeCoreLink, and what tests want to know of it."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from engine_svc.frontend.observer import RequestRecord
from engine_svc.frontend.server import FrontendOptions, FrontendServer, build_server
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.log import Log
from engine_svc.names import AdapterEntry, AliasEntry, NameMap, NameMapUpdate
from engine_svc.types import AdapterRef
from loraplex.channel import insecure_aio_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import LoraplexError, from_rpc_error
from tests.support.fake_core_link import FakeCoreLink

BASE = "smollm2-135m-instruct"
TENANT = "default"


class FakeObserver:
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def request_ended(self, record: RequestRecord) -> None:
        self.records.append(record)


def adapter(name: str, version: int = 1, **values: Any) -> AdapterRef:
    digest = f"sha256:{name}-{version}"
    return AdapterRef(name, version, digest, **{"tenant": TENANT, "max_rank": 8, **values})


def name_map(
    *refs: AdapterRef, older: Sequence[AdapterRef] = (), aliases: Sequence[AliasEntry] = ()
) -> NameMap:
    names = NameMap()
    entries = tuple(AdapterEntry(ref.name, ref.tenant, ref.public, True, ref) for ref in refs)
    names.apply(
        NameMapUpdate(7, entries, versions=tuple(older), aliases=tuple(aliases), snapshot=True)
    )
    return names


@dataclass
class Frontend:
    """The running server with all that stands around it."""

    server: FrontendServer
    link: FakeCoreLink
    names: NameMap
    channel: grpc.aio.Channel
    observer: FakeObserver
    log: io.StringIO
    stub: engine_pb2_grpc.EngineStub = field(init=False)

    def __post_init__(self) -> None:
        self.stub = engine_pb2_grpc.EngineStub(self.channel)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def call(self, model: str = BASE, *, tenant: str | None = None, **fields: Any) -> Any:
        """Start Generate; a dict for `sampling` sets its fields."""
        sampling = engine_pb2.SamplingParams(**fields.pop("sampling", {}))
        timeout = fields.pop("timeout", 20.0)
        request = engine_pb2.GenerateRequest(model=model, sampling=sampling, **fields)
        metadata = None if tenant is None else (("x-loraplex-tenant", tenant),)
        return self.stub.Generate(request, timeout=timeout, metadata=metadata)

    async def answer(self, **fields: Any) -> list[engine_pb2.GenerateResponse]:
        return [message async for message in self.call(**fields)]

    async def refusal(self, **fields: Any) -> LoraplexError:
        """The error that a Generate call ends with."""
        return await error_of(self.call(**fields))


async def error_of(call: Any) -> LoraplexError:
    """The error that a stream ends with."""
    try:
        async for _ in call:
            pass
    except grpc.RpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call succeeded")


def text_of(messages: Sequence[engine_pb2.GenerateResponse], choice: int = 0) -> str:
    return "".join(
        message.delta.text
        for message in messages
        if message.HasField("delta") and message.delta.choice == choice
    )


def token_ids_of(messages: Sequence[engine_pb2.GenerateResponse], choice: int = 0) -> list[int]:
    deltas = [message.delta for message in messages if message.HasField("delta")]
    return [token for delta in deltas if delta.choice == choice for token in delta.token_ids]


@asynccontextmanager
async def running_frontend(
    text: ModelText, link: FakeCoreLink | None = None, names: NameMap | None = None
) -> AsyncIterator[Frontend]:
    """Serve on a free port until the block ends."""
    link = link or FakeCoreLink()
    names = names or name_map(adapter("sql-lora"), adapter("kefu-lora"))
    observer, log = FakeObserver(), io.StringIO()
    server = build_server(
        FrontendOptions("127.0.0.1:0", BASE, engine_id="engine-1"),
        link=link,
        names=names,
        text=text,
        log=Log("frontend", stream=log),
        observers=(observer,),
    )
    await server.start()
    channel = insecure_aio_channel(f"127.0.0.1:{server.port}")
    try:
        yield Frontend(server, link, names, channel, observer, log)
    finally:
        await channel.close()
        await server.stop()
        await link.close()
