"""The links between processes, with fakes at their far ends and real sockets between."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from engine_svc.frontend.core_link import LinkPhase
from engine_svc.messages import (
    Cancel,
    CoreHello,
    Drop,
    FrontendHello,
    SharesChanged,
    SnapshotAnswer,
    SnapshotRequest,
    Submit,
    Want,
)
from engine_svc.names import AdapterEntry, NameMap, NameMapUpdate
from engine_svc.processes.links import FrontendLink, SocketTransport
from engine_svc.processes.loader_link import LoaderLink
from engine_svc.processes.names_feed import NamesFeed, NamesReceiver
from engine_svc.processes.socket import Channel, ChannelClosed, Outbox, make_socket_dir, serve
from engine_svc.shares import Shares
from engine_svc.snapshots import CoreSnapshot
from engine_svc.types import (
    AdapterRef,
    Admitted,
    EngineLimits,
    Failure,
    FlowKey,
    HostSpan,
    Request,
    RequestEnded,
    SamplingParams,
    ServiceClass,
    StepOutputs,
    TenantQuota,
    WeightsFailed,
    WeightsReady,
)
from loraplex.status import Unavailable
from tests.support.waiting import eventually

KEY = b"k" * 32
LIMITS = EngineLimits(2, 4, 64, 10, 16, 4096, 3, 128)
HELLO = CoreHello(1, LIMITS, "float32", 16, 0)


def request(request_id: str) -> Request:
    flow = FlowKey(ServiceClass.INTERACTIVE, "default", "")
    return Request(request_id, flow, (1, 2), SamplingParams(max_tokens=4, seed=1), 0.0)


def ref(name: str) -> AdapterRef:
    return AdapterRef(name, 1, f"sha256:{name}", "default")


def ready(name: str) -> WeightsReady:
    return WeightsReady(f"sha256:{name}", HostSpan(0, 4096), 1, 100, "store", 0.1)


@dataclass
class FarEnd:
    """A listener that keeps what it hears; `greet` is called with each new channel."""

    path: str
    greet: Callable[[Channel], None]
    heard: list[object] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = serve(self.path, KEY, self._accepted)

    def _accepted(self, channel: Channel) -> None:
        self.greet(channel)
        self.channels.append(channel)
        try:
            while True:
                self.heard.append(channel.receive())
        except ChannelClosed:
            return

    def die(self) -> None:
        """Like a process that is killed."""
        self._stop()
        for channel in self.channels:
            channel.close()


@pytest.fixture
def path() -> Iterator[str]:
    folder = make_socket_dir()
    yield os.path.join(folder, "far")
    shutil.rmtree(folder)


async def until(ask: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not ask():
            await asyncio.sleep(0.005)


def frontend_link(path: str) -> tuple[FrontendLink, SocketTransport]:
    link = FrontendLink()
    loop = asyncio.get_running_loop()
    return link, SocketTransport(link, loop, path, KEY, FrontendHello(0, os.getpid()))


def say_hello(channel: Channel) -> None:
    channel.send(HELLO)


# ---- frontend → core


async def test_link_serves_once_the_core_is_there_and_the_names_are_complete(path: str) -> None:
    far = FarEnd(path, say_hello)
    link, transport = frontend_link(path)
    await until(lambda: link.hello)
    assert link.phase is LinkPhase.STARTING
    with pytest.raises(Unavailable, match="not finished starting"):
        link.submit(request("a"))
    link.names_ready()
    assert link.phase is LinkPhase.SERVING
    transport.stop()
    far.die()


async def test_request_and_outputs_cross_the_socket(path: str) -> None:
    far = FarEnd(path, say_hello)
    link, transport = frontend_link(path)
    link.names_ready()
    await until(lambda: link.phase is LinkPhase.SERVING)
    stream = link.submit(request("a"))
    await until(lambda: Submit(request("a")) in far.heard)
    far.channels[0].send(StepOutputs(1, (Admitted("a"),)))
    assert await anext(stream) == Admitted("a")
    link.cancel("a")
    link.cancel("a")
    await until(lambda: Cancel("a") in far.heard)
    assert far.heard.count(Cancel("a")) == 1
    transport.stop()
    far.die()


async def test_a_core_that_dies_ends_open_streams_and_a_new_one_is_found(path: str) -> None:
    far = FarEnd(path, say_hello)
    link, transport = frontend_link(path)
    link.names_ready()
    phases: list[LinkPhase] = []
    link.watch_phase(phases.append)
    await until(lambda: link.phase is LinkPhase.SERVING)
    stream = link.submit(request("a"))
    far.die()
    ended = await asyncio.wait_for(anext(stream), 5)
    assert isinstance(ended, RequestEnded)
    assert ended.failure is not None
    assert (ended.failure.code, ended.failure.reason) == ("UNAVAILABLE", "ENGINE_LOST")
    again = FarEnd(path, say_hello)
    await until(lambda: link.phase is LinkPhase.SERVING)
    assert phases == [LinkPhase.SERVING, LinkPhase.STARTING, LinkPhase.SERVING]
    transport.stop()
    again.die()


async def test_snapshot_waits_for_its_own_answer(path: str) -> None:
    far = FarEnd(path, say_hello)
    link, transport = frontend_link(path)
    await until(lambda: link.hello)
    first, second = (asyncio.ensure_future(link.snapshot()) for _ in range(2))
    await until(lambda: len(far.heard) == 3)
    for message in reversed(far.heard[1:]):
        assert isinstance(message, SnapshotRequest)
        far.channels[0].send(SnapshotAnswer(message.ticket, CoreSnapshot(steps=message.ticket)))
    assert [(await one).steps for one in (first, second)] == [0, 1]
    transport.stop()
    far.die()


async def test_a_draining_link_stays_draining_when_the_core_goes(path: str) -> None:
    far = FarEnd(path, say_hello)
    link, transport = frontend_link(path)
    link.names_ready()
    await until(lambda: link.phase is LinkPhase.SERVING)
    link.drain()
    link.lost()
    assert link.phase is LinkPhase.DRAINING
    transport.stop()
    far.die()


# ---- core → loader


def test_wants_without_answer_are_repeated_in_order_to_a_new_loader(path: str) -> None:
    woken = threading.Event()
    link = LoaderLink(path, KEY, woken.set)
    link.want(ref("b"), 1)
    link.want(ref("a"), 0)
    link.want(ref("done"), 2)
    far = FarEnd(path, lambda channel: None)
    link.start(HELLO)
    eventually(lambda: len(far.heard) == 4)
    assert far.heard == [HELLO, Want(ref("a"), 0), Want(ref("b"), 1), Want(ref("done"), 2)]
    far.channels[0].send(ready("done"))
    assert woken.wait(5)
    assert link.poll() == (ready("done"),)
    far.die()
    again = FarEnd(path, lambda channel: None)
    eventually(lambda: len(again.heard) == 4)
    assert again.heard == [HELLO, ready("done"), Want(ref("a"), 0), Want(ref("b"), 1)]
    link.drop("sha256:done")
    eventually(lambda: again.heard[-1] == Drop("sha256:done"))
    link.stop()
    again.die()


def test_shares_pass_the_link_beside_the_answers(path: str) -> None:
    heard: list[Shares] = []
    link = LoaderLink(path, KEY, lambda: None, heard.append)
    far = FarEnd(path, lambda channel: None)
    link.start(HELLO)
    link.want(ref("a"), 0)
    eventually(lambda: far.channels)
    shares = Shares({"acme": 2.0}, {"sha256:a": 4.0}, {"acme": TenantQuota(3, 9)})
    far.channels[0].send(SharesChanged(shares))
    far.channels[0].send(ready("a"))
    assert eventually(link.poll) == (ready("a"),)
    assert heard == [shares]
    link.stop()
    far.die()


def test_each_want_gets_one_answer_even_when_a_loader_answers_twice(path: str) -> None:
    link = LoaderLink(path, KEY, lambda: None)
    far = FarEnd(path, lambda channel: None)
    link.start(HELLO)
    link.want(ref("a"), 0)
    failed = WeightsFailed("sha256:a", Failure("DATA_LOSS", "DIGEST_MISMATCH", "broken"))
    eventually(lambda: far.channels)
    far.channels[0].send(failed)
    far.channels[0].send(failed)
    link.want(ref("b"), 0)
    far.channels[0].send(ready("b"))
    answers: list[object] = []
    eventually(lambda: answers.extend(link.poll()) or len(answers) == 2)
    assert answers == [failed, ready("b")]
    link.stop()
    far.die()


def test_a_span_that_was_given_twice_is_dropped_once_the_core_is_done(path: str) -> None:
    link = LoaderLink(path, KEY, lambda: None)
    far = FarEnd(path, lambda channel: None)
    link.start(HELLO)
    link.want(ref("a"), 0)
    eventually(lambda: far.channels)
    far.channels[0].send(ready("a"))
    assert eventually(link.poll) == (ready("a"),)
    link.want(ref("a"), 1)
    link.drop("sha256:a")
    far.channels[0].send(ready("a"))
    eventually(lambda: far.heard.count(Drop("sha256:a")) == 2)
    assert far.heard.count(Want(ref("a"), 1)) == 0
    assert link.poll() == ()
    link.stop()
    far.die()


# ---- loader → frontend


def entry(name: str) -> AdapterEntry:
    return AdapterEntry(name, "default", False, True, ref(name))


async def test_frontends_get_a_snapshot_when_the_feed_opens_and_changes_after(path: str) -> None:
    feed = NamesFeed()
    feed.apply(NameMapUpdate(1, adapters=(entry("early"),)))
    names = NameMap()
    outboxes: list[Outbox] = []

    def accepted(channel: Channel) -> None:
        channel.receive()
        outboxes.append(Outbox(channel))
        feed.attach(outboxes[-1])

    stop = serve(path, KEY, accepted)
    loop = asyncio.get_running_loop()
    stale: list[bool] = []
    receiver = NamesReceiver(loop, path, KEY, FrontendHello(0, 1), names.apply, stale.append)
    await until(lambda: outboxes)
    assert names.revision == 0
    assert feed.open()
    assert not feed.open()
    await until(lambda: names.revision == 1)
    feed.apply(NameMapUpdate(2, adapters=(entry("late"),)))
    await until(lambda: names.revision == 2)
    assert [one.name for one in names.list("default")] == ["early", "late"]
    assert stale == [False]
    feed.set_stale(True)
    await until(lambda: stale == [False, True])
    receiver.stop()
    stop()
    outboxes[0].close()
