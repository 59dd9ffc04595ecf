"""How a Generate call can end early, over a real socket."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from engine_svc.failures import failure_of
from engine_svc.frontend.core_link import LinkPhase
from engine_svc.frontend.router import BufferLimits
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.types import Admitted, Request, SequenceOutput
from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import ResourceExhausted
from tests.support.fake_core_link import HOLD, FakeCoreLink, Step, ended
from tests.support.frontend_server import BASE, Frontend, error_of, running_frontend, text_of

TOKEN = 19556  # "Hello"


@pytest.fixture(scope="module")
def text(demo_model_dir: Path) -> ModelText:
    return ModelText.load(demo_model_dir)


def two_then_hold(request: Request) -> Iterator[Step]:
    yield (Admitted(request.request_id),)
    yield (SequenceOutput(request.request_id, 0, (TOKEN, TOKEN)),)
    yield HOLD


@pytest.fixture
async def held(text: ModelText) -> AsyncIterator[Frontend]:
    """A frontend whose requests get two tokens, then nothing."""
    async with running_frontend(text, FakeCoreLink(two_then_hold)) as frontend:
        yield frontend


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def begun(call: AsyncIterable[engine_pb2.GenerateResponse]) -> None:
    """Read `started` and the first delta."""
    assert (await anext(aiter(call))).HasField("started")
    assert (await anext(aiter(call))).HasField("delta")


async def test_a_cancelled_call_is_cancelled_at_the_core(held: Frontend) -> None:
    call = held.call(prompt="x")
    await begun(call)
    call.cancel()
    await until(lambda: held.observer.records)
    assert held.link.cancelled == [held.link.requests[0].request_id]
    assert len(held.link.router) == 0
    (record,) = held.observer.records
    assert (record.outcome, record.completion_tokens) == ("CANCELLED", 2)


async def test_a_client_that_goes_away_is_cancelled_at_the_core(held: Frontend) -> None:
    await begun(held.call(prompt="x"))
    await held.channel.close()
    await until(lambda: held.link.cancelled)


async def test_a_deadline_reaches_the_core_and_ends_the_call(held: Frontend) -> None:
    error = await held.refusal(prompt="x", timeout=0.3)
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: held.observer.records)
    (request,) = held.link.requests
    assert 0.0 < request.deadline_s - request.received_s <= 0.31
    assert held.link.cancelled == [request.request_id]
    assert held.observer.records[0].outcome == "DEADLINE_EXCEEDED"


async def test_without_a_deadline_the_core_gets_none(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        await frontend.answer(prompt="x", timeout=None)
        assert frontend.link.requests[0].deadline_s == float("inf")


async def test_a_failure_of_the_core_reaches_the_client_whole(text: ModelText) -> None:
    failure = failure_of(
        ResourceExhausted(
            "queue is full", reason="QUEUE_FULL", metadata={"limit": "7"}, retry_after_s=2.5
        )
    )

    def script(request: Request) -> Iterator[Step]:
        yield (ended(request, failure=failure),)

    async with running_frontend(text, FakeCoreLink(script)) as frontend:
        error = await frontend.refusal(prompt="x")
        assert frontend.link.cancelled == []
    assert isinstance(error, ResourceExhausted)
    assert (error.message, error.reason) == ("queue is full", "QUEUE_FULL")
    assert error.metadata == {"limit": "7"}
    assert error.retry_after_s == 2.5
    assert frontend.observer.records[0].reason == "QUEUE_FULL"


async def test_a_dead_core_ends_open_streams_and_says_what_was_delivered(held: Frontend) -> None:
    call = held.call(prompt="x")
    await begun(call)
    held.link.die()
    error = await error_of(call)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
    assert error.metadata["tokens_delivered"] == "2"
    later = await held.refusal(prompt="x")
    assert later.reason == "STARTING"


@pytest.mark.parametrize("phase", [LinkPhase.STARTING, LinkPhase.DRAINING])
async def test_new_requests_are_refused_outside_serving(phase: LinkPhase, text: ModelText) -> None:
    async with running_frontend(text, FakeCoreLink(phase=phase)) as frontend:
        error = await frontend.refusal(prompt="x")
        assert frontend.link.requests == []
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, phase.name)
    assert error.retry_after_s == 1.0


def flood(request: Request) -> Iterator[Step]:
    yield (Admitted(request.request_id),)
    for _ in range(200_000):
        yield (SequenceOutput(request.request_id, 0, (TOKEN,) * 200),)


def slow_channel(address: str) -> grpc.aio.Channel:
    """A client with a small, fixed window, so that what it does not read stays at the server."""
    options = [
        ("grpc.enable_http_proxy", 0),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1024),
    ]
    return grpc.aio.insecure_channel(address, options=options)


async def test_a_slow_reader_is_ended_and_others_are_not(text: ModelText) -> None:
    def script(request: Request) -> Iterator[Step]:
        return flood(request) if len(request.prompt_token_ids) == 1 else link.echo(request)

    link = FakeCoreLink(script, limits=BufferLimits(max_items=50, grace_s=0.1))
    async with (
        running_frontend(text, link) as frontend,
        slow_channel(frontend.address) as channel,
    ):
        stub = engine_pb2_grpc.EngineStub(channel)
        slow = stub.Generate(
            engine_pb2.GenerateRequest(model="sql-lora", prompt="Hello"), timeout=20
        )
        assert (await anext(aiter(slow))).HasField("started")
        await until(lambda: link.requests)
        other = await frontend.answer(prompt="Hello world")
        await until(lambda: link.cancelled)
        assert text_of(other) == "Hello world"
        assert link.cancelled[0] == link.requests[0].request_id
        error = await error_of(slow)
        await until(lambda: len(frontend.observer.records) == 2)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "READER_TOO_SLOW")
    assert error.metadata["limit"] == "50"
    outcomes = {record.model: record.reason for record in frontend.observer.records}
    assert outcomes["sql-lora"] == "READER_TOO_SLOW"


async def test_a_bug_is_logged_with_its_stack_and_told_without(text: ModelText) -> None:
    def script(request: Request) -> Iterator[Step]:
        yield (SequenceOutput(request.request_id, 99, (TOKEN,)),)

    async with running_frontend(text, FakeCoreLink(script)) as frontend:
        error = await frontend.refusal(prompt="x")
        assert frontend.link.cancelled == [frontend.link.requests[0].request_id]
        line = next(line for line in frontend.log_lines if line["event"] == "rpc.failed")
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INVARIANT")
    assert "IndexError" not in error.message
    assert "IndexError" in line["stack"]
    assert frontend.observer.records[0].outcome == "INTERNAL"


async def test_a_drain_lets_open_streams_end(text: ModelText) -> None:
    def script(request: Request) -> Iterator[Step]:
        yield from two_then_hold(request)
        yield (ended(request),)

    async with running_frontend(text, FakeCoreLink(script)) as frontend:
        call = frontend.call(prompt="x")
        await begun(call)
        frontend.link.router.set_phase(LinkPhase.DRAINING)
        drain = asyncio.create_task(frontend.server.drain(10.0))
        refused = await frontend.refusal(prompt="x")
        frontend.link.resume()
        assert [message async for message in call][-1].HasField("summary")
        await drain
    assert refused.reason == "DRAINING"


async def test_calls_that_come_all_at_once_are_all_told_why(text: ModelText) -> None:
    """More than gRPC holds back by itself: it would cancel some of them without a word."""
    async with running_frontend(text, FakeCoreLink(phase=LinkPhase.STARTING)) as frontend:
        with insecure_channel(frontend.address) as channel:
            # nothing else runs in this loop meanwhile: the server takes no call
            calls = start_calls(channel, 3500)
            codes = await asyncio.to_thread(lambda: Counter(call.code() for call in calls))
    assert codes == {grpc.StatusCode.UNAVAILABLE: 3500}


async def test_calls_that_came_before_the_drain_are_told_of_it(text: ModelText) -> None:
    """gRPC has them, but the busy loop has not taken them yet."""
    async with running_frontend(text) as frontend:
        with insecure_channel(frontend.address) as channel:
            await asyncio.to_thread(grpc.channel_ready_future(channel).result)
            calls = start_calls(channel, 100)
            frontend.link.router.set_phase(LinkPhase.DRAINING)
            await frontend.server.drain(5.0)
            codes = await asyncio.to_thread(lambda: Counter(call.code() for call in calls))
    assert codes == {grpc.StatusCode.UNAVAILABLE: 100}


def start_calls(channel: grpc.Channel, count: int) -> list[grpc.Call]:
    request = engine_pb2.GenerateRequest(model=BASE, prompt="x")
    stub = engine_pb2_grpc.EngineStub(channel)
    return [stub.Generate(request, timeout=20.0) for _ in range(count)]


async def test_what_outlives_the_drain_gets_a_status(held: Frontend) -> None:
    call = held.call(prompt="x")
    await begun(call)
    held.link.router.set_phase(LinkPhase.DRAINING)
    drain = asyncio.create_task(held.server.drain(0.05))
    error = await error_of(call)
    await drain
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert error.metadata["tokens_delivered"] == "2"
    assert held.link.cancelled == [held.link.requests[0].request_id]
