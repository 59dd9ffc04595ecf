import asyncio
import io
import json
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from engine_svc.frontend.errors import mapped
from engine_svc.log import Log
from loraplex.status import NotFound


class FakeContext:
    """Keeps the status; a client that is gone makes abort fail as grpc.aio does."""

    def __init__(self, gone: bool = False) -> None:
        self.gone = gone
        self.status: Any = None

    async def abort_with_status(self, status: Any) -> None:
        if self.gone:
            raise grpc.aio.InternalError("no call")
        self.status = status
        raise grpc.aio.AbortError("told")


class FakeServicer:
    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.log = Log("test", stream=self.stream)

    @mapped
    async def Method(self, request: object, context: FakeContext) -> object:
        if isinstance(request, BaseException):
            raise request
        return request


async def test_an_answer_passes_through() -> None:
    assert await FakeServicer().Method("request", FakeContext()) == "request"


async def test_our_errors_keep_code_and_details() -> None:
    context = FakeContext()
    with pytest.raises(grpc.aio.AbortError):
        await FakeServicer().Method(NotFound("no adapter 'x'", retry_after_s=1.5), context)
    assert context.status.code is grpc.StatusCode.NOT_FOUND
    assert context.status.details == "no adapter 'x'"
    ((key, _),) = context.status.trailing_metadata
    assert key == rpc_status.GRPC_DETAILS_METADATA_KEY


async def test_a_bug_is_told_without_its_words_and_logged_with_them() -> None:
    servicer, context = FakeServicer(), FakeContext()
    with pytest.raises(grpc.aio.AbortError):
        await servicer.Method(ZeroDivisionError("secret detail"), context)
    assert context.status.code is grpc.StatusCode.INTERNAL
    assert "secret" not in context.status.details
    line = json.loads(servicer.stream.getvalue())
    assert (line["event"], line["method"]) == ("rpc.failed", "Method")
    assert "secret detail" in line["stack"]


async def test_cancellation_is_no_error() -> None:
    servicer, context = FakeServicer(), FakeContext()
    with pytest.raises(asyncio.CancelledError):
        await servicer.Method(asyncio.CancelledError(), context)
    assert (context.status, servicer.stream.getvalue()) == (None, "")


async def test_an_error_for_a_client_that_is_gone_ends_quietly() -> None:
    with pytest.raises(asyncio.CancelledError):
        await FakeServicer().Method(NotFound("x"), FakeContext(gone=True))
