"""A small client of the engine, over the generated stubs.

    with Client() as client:
        for text in client.generate("sql-lora", prompt="List all flights"):
            print(text, end="", flush=True)

`AsyncClient` is the same with `async`. Errors are those of loraplex.status. What this does not
cover, the stubs in loraplex.engine.v1 do.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc

from loraplex.channel import insecure_aio_channel, insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import from_rpc_error
from loraplex.tenants import tenant_metadata

ADDRESS_VARIABLE = "LORAPLEX_ENGINE_ADDRESS"
DEFAULT_ADDRESS = "127.0.0.1:50052"
_PAGE_SIZE = 1000

Event = engine_pb2.GenerateResponse
Call = TypeVar("Call")


class _Stream(Generic[Call]):
    """What a stream has said so far: `started`, `finished` (one per choice), `summary`."""

    def __init__(self, call: Call) -> None:
        self._call: Any = call
        self.started: engine_pb2.Started | None = None
        self.finished: list[engine_pb2.Finished] = []
        self.summary: engine_pb2.Summary | None = None

    def cancel(self) -> None:
        """Stop the request; the engine frees what it holds."""
        self._call.cancel()

    def _note(self, event: Event) -> str:
        """Keep an event; the text that it adds."""
        kind = event.WhichOneof("item")
        if kind == "started":
            self.started = event.started
        elif kind == "finished":
            self.finished.append(event.finished)
        elif kind == "summary":
            self.summary = event.summary
        return event.delta.text


class TextStream(_Stream[Any]):
    """Iterates over pieces of text. With n > 1 iterate over `events`, which name their choice."""

    def __iter__(self) -> Iterator[str]:
        return filter(None, map(self._note, self._received()))

    def events(self) -> Iterator[Event]:
        """The messages themselves."""
        for event in self._received():
            self._note(event)
            yield event

    def text(self) -> str:
        """Wait for the end; all the text that is left."""
        return "".join(self)

    def _received(self) -> Iterator[Event]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


class AsyncTextStream(_Stream[Any]):
    """The same, asynchronously."""

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self._received():
            text = self._note(event)
            if text:
                yield text

    async def events(self) -> AsyncIterator[Event]:
        async for event in self._received():
            self._note(event)
            yield event

    async def text(self) -> str:
        return "".join([piece async for piece in self])

    async def _received(self) -> AsyncIterator[Event]:
        try:
            async for event in self._call:
                yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


class Client:
    """Talks to one engine; `address` defaults to LORAPLEX_ENGINE_ADDRESS, else this machine's."""

    def __init__(self, address: str | None = None, *, tenant: str | None = None) -> None:
        self._channel = insecure_channel(_address(address))
        self._stub = engine_pb2_grpc.EngineStub(self._channel)
        self._metadata = tenant_metadata(tenant)

    def generate(
        self,
        model: str,
        *,
        prompt: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        **sampling: Any,
    ) -> TextStream:
        """Start a request with exactly one of prompt, token_ids and messages.

        `sampling` are fields of SamplingParams: temperature, max_tokens, stop, seed …
        Raises: TypeError: a wrong argument. The stream raises LoraplexError.
        """
        request = build_request(model, prompt, token_ids, messages, request_id, sampling)
        return TextStream(self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata))

    def list_models(self) -> list[engine_pb2.Model]:
        """The base model and the adapters that this tenant may use."""
        models: list[engine_pb2.Model] = []
        request = engine_pb2.ListModelsRequest(page_size=_PAGE_SIZE)
        while True:
            try:
                page = self._stub.ListModels(request, metadata=self._metadata)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            models.extend(page.models)
            request.page_token = page.next_page_token
            if not request.page_token:
                return models

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio; make it inside the running loop."""

    def __init__(self, address: str | None = None, *, tenant: str | None = None) -> None:
        self._channel = insecure_aio_channel(_address(address))
        self._stub: Any = engine_pb2_grpc.EngineStub(self._channel)
        self._metadata = tenant_metadata(tenant)

    def generate(
        self,
        model: str,
        *,
        prompt: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
        **sampling: Any,
    ) -> AsyncTextStream:
        """As Client.generate."""
        request = build_request(model, prompt, token_ids, messages, request_id, sampling)
        return AsyncTextStream(
            self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        )

    async def list_models(self) -> list[engine_pb2.Model]:
        """As Client.list_models."""
        models: list[engine_pb2.Model] = []
        request = engine_pb2.ListModelsRequest(page_size=_PAGE_SIZE)
        while True:
            try:
                page = await self._stub.ListModels(request, metadata=self._metadata)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error
            models.extend(page.models)
            request.page_token = page.next_page_token
            if not request.page_token:
                return models

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def build_request(
    model: str,
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[Mapping[str, str]] | None,
    request_id: str,
    sampling: Mapping[str, Any],
) -> engine_pb2.GenerateRequest:
    """Raises: TypeError: not exactly one input, or a sampling field that does not exist."""
    if (prompt is not None) + (token_ids is not None) + (messages is not None) != 1:
        raise TypeError("give exactly one of prompt, token_ids, messages")
    known = engine_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    unknown = sorted(set(sampling) - set(known))
    if unknown:
        raise TypeError(f"no sampling field {', '.join(unknown)}; there are {', '.join(known)}")
    stop = sampling.get("stop")
    fields = {**sampling, "stop": [stop]} if isinstance(stop, str) else dict(sampling)
    request = engine_pb2.GenerateRequest(
        model=model, request_id=request_id, sampling=engine_pb2.SamplingParams(**fields)
    )
    if prompt is not None:
        request.prompt = prompt
    elif token_ids is not None:
        request.token_ids.CopyFrom(engine_pb2.TokenIds(ids=token_ids))
    elif messages is not None:
        chat = [engine_pb2.ChatMessage(**message) for message in messages]
        request.chat.CopyFrom(engine_pb2.ChatMessages(messages=chat))
    return request


def _address(address: str | None) -> str:
    return address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
