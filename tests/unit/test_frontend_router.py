import asyncio

import pytest

from engine_svc.frontend.core_link import TAKE_LIMIT, LinkPhase
from engine_svc.frontend.router import BufferLimits, OutputRouter
from engine_svc.types import Admitted, RequestEnded, RequestStats, SequenceOutput
from loraplex.status import Unavailable


class Bench:
    """A router with a clock that the test sets."""

    def __init__(self, limits: BufferLimits | None = None) -> None:
        self.now = 0.0
        self.cancelled: list[str] = []
        self.router = OutputRouter(self.cancelled.append, lambda: self.now, limits)
        self.router.set_phase(LinkPhase.SERVING)

    def token(self, request_id: str, token_id: int = 0) -> None:
        self.router.deliver([SequenceOutput(request_id, 0, (token_id,))])
        self.router.check_integrity()


def end(request_id: str) -> RequestEnded:
    return RequestEnded(request_id, RequestStats())


async def test_items_reach_the_stream_of_their_request_in_order() -> None:
    bench = Bench()
    one, two = bench.router.open("one"), bench.router.open("two")
    items = [Admitted("one"), Admitted("two"), SequenceOutput("one", 0, (5,)), end("one")]
    bench.router.deliver(items)
    assert [item async for item in one] == [items[0], items[2], items[3]]
    assert await two.take() == (items[1],)
    assert not two.ended
    assert len(bench.router) == 1


async def test_take_waits_and_hands_over_all_that_came() -> None:
    bench = Bench()
    stream = bench.router.open("a")
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert not taking.done()
    bench.router.deliver([Admitted("a"), end("a")])
    assert len(await taking) == 2
    assert await stream.take() == ()


async def test_a_cancelled_take_loses_nothing() -> None:
    bench = Bench()
    stream = bench.router.open("a")
    taking = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.sleep(0)
    bench.token("a", 9)
    assert await stream.take() == (SequenceOutput("a", 0, (9,)),)


async def test_one_take_is_bounded() -> None:
    bench = Bench()
    stream = bench.router.open("a")
    for _ in range(TAKE_LIMIT + 1):
        bench.token("a")
    assert [len(await stream.take()) for _ in range(2)] == [TAKE_LIMIT, 1]


async def test_what_comes_after_close_is_ignored() -> None:
    bench = Bench()
    bench.router.open("a")
    assert bench.router.close("a")
    assert not bench.router.close("a")
    bench.token("a")
    bench.router.deliver([end("a")])
    assert len(bench.router) == 0


async def test_a_buffer_that_stays_full_ends_its_stream_alone() -> None:
    bench = Bench(BufferLimits(max_items=4, grace_s=1.0))
    slow, other = bench.router.open("slow"), bench.router.open("other")
    for _ in range(5):
        bench.token("slow")
    bench.token("other")
    bench.now = 1.0
    bench.token("slow")
    assert bench.cancelled == []
    bench.now = 1.1
    bench.token("slow")
    bench.token("slow")
    assert bench.cancelled == ["slow"]
    assert slow.was_cut
    (last,) = await slow.take()
    assert isinstance(last, RequestEnded)
    assert last.failure is not None
    assert last.failure.reason == "READER_TOO_SLOW"
    assert len(await other.take()) == 1


async def test_a_reader_that_catches_up_in_time_goes_on() -> None:
    bench = Bench(BufferLimits(max_items=4, grace_s=1.0))
    stream = bench.router.open("a")
    for second in range(5):
        bench.now = float(second)
        for _ in range(6):
            bench.token("a")
        assert len(await stream.take()) == 6
    assert bench.cancelled == []


async def test_twice_the_limit_at_once_is_too_much() -> None:
    bench = Bench(BufferLimits(max_items=4, grace_s=1.0))
    bench.router.open("a")
    for _ in range(8):
        bench.token("a")
    assert bench.cancelled == []
    bench.token("a")
    assert bench.cancelled == ["a"]


async def test_a_lost_core_ends_every_stream_after_what_it_said() -> None:
    bench = Bench()
    streams = [bench.router.open(name) for name in ("a", "b")]
    bench.token("a")
    bench.router.lose_core()
    for stream, count in zip(streams, (2, 1), strict=True):
        items = await stream.take()
        assert len(items) == count
        last = items[-1]
        assert isinstance(last, RequestEnded)
        assert last.failure is not None
        assert last.failure.reason == "ENGINE_LOST"
        assert stream.ended
    assert bench.router.phase is LinkPhase.STARTING
    with pytest.raises(Unavailable) as caught:
        bench.router.open("c")
    assert caught.value.reason == "STARTING"


def test_watchers_hear_of_changes_only() -> None:
    bench = Bench()
    heard: list[LinkPhase] = []
    bench.router.watch_phase(heard.append)
    for phase in (LinkPhase.SERVING, LinkPhase.DRAINING, LinkPhase.DRAINING):
        bench.router.set_phase(phase)
    assert heard == [LinkPhase.DRAINING]
