"""What every CoreLink promises: the fake of these tests and the one of the engine's processes."""

from collections.abc import Callable

import pytest

from engine_svc.frontend.core_link import CoreLink, LinkPhase
from engine_svc.messages import Cancel
from engine_svc.processes.links import FrontendLink
from engine_svc.types import (
    Admitted,
    FlowKey,
    Request,
    RequestEnded,
    SamplingParams,
    ServiceClass,
    StepOutputs,
)
from loraplex.status import Unavailable
from tests.support.fake_core_link import HOLD, FakeCoreLink

REQUEST = Request(
    "r", FlowKey(ServiceClass.INTERACTIVE, "default", ""), (1,), SamplingParams(1, 0), 0.0
)


class FakePeer:
    """The core's end of a FrontendLink: keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def put(self, message: object) -> None:
        self.sent.append(message)

    def is_stalled(self) -> bool:
        return False

    def close(self) -> None: ...


class Rig:
    """A link and the core's deeds on it."""

    link: CoreLink
    start: Callable[[], None]
    admit: Callable[[], None]
    die: Callable[[], None]
    num_cancels: Callable[[], int]


class FakeRig(Rig):
    def __init__(self) -> None:
        link = FakeCoreLink(lambda request: iter([HOLD]), phase=LinkPhase.STARTING)
        self.link = link
        self.start = lambda: link.router.set_phase(LinkPhase.SERVING)
        self.admit = lambda: link.router.deliver([Admitted("r")])
        self.die = link.die
        self.num_cancels = lambda: len(link.cancelled)


class ProcessRig(Rig):
    def __init__(self) -> None:
        link, peer = FrontendLink(), FakePeer()
        link.names_ready()
        self.link = link
        self.start = lambda: link.connected(None, peer)
        self.admit = lambda: link.receive(StepOutputs(1, (Admitted("r"),)))
        self.die = link.lost
        self.num_cancels = lambda: sum(isinstance(message, Cancel) for message in peer.sent)


@pytest.fixture(params=[FakeRig, ProcessRig])
async def rig(request: pytest.FixtureRequest) -> Rig:
    made: Rig = request.param()
    return made


async def test_before_serving_nothing_is_taken(rig: Rig) -> None:
    for ask in (lambda: rig.link.submit(REQUEST), None):
        with pytest.raises(Unavailable) as caught:
            ask() if ask is not None else await rig.link.snapshot()
        assert caught.value.reason == "STARTING"


async def test_watchers_hear_that_it_serves(rig: Rig) -> None:
    heard: list[LinkPhase] = []
    rig.link.watch_phase(heard.append)
    rig.start()
    assert heard == [rig.link.phase] == [LinkPhase.SERVING]


async def test_items_reach_the_stream_until_it_is_cancelled(rig: Rig) -> None:
    rig.start()
    stream = rig.link.submit(REQUEST)
    rig.admit()
    assert await stream.take() == (Admitted("r"),)
    rig.link.cancel("r")
    rig.admit()
    assert len(stream) == 0
    assert rig.num_cancels() == 1


async def test_a_dead_core_ends_open_streams(rig: Rig) -> None:
    rig.start()
    stream = rig.link.submit(REQUEST)
    rig.die()
    (last,) = await stream.take()
    assert isinstance(last, RequestEnded)
    assert last.failure is not None
    assert last.failure.reason == "ENGINE_LOST"
    assert rig.link.phase is LinkPhase.STARTING
