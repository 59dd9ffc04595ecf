"""Channels and outboxes over real Unix sockets."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_svc.processes.socket import (
    Channel,
    ChannelClosed,
    Outbox,
    connect,
    make_socket_dir,
    serve,
)
from tests.support.waiting import eventually

KEY = b"k" * 32


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    folder = make_socket_dir()
    accepted: list[Channel] = []
    path = os.path.join(folder, "core.sock")
    stop = serve(path, KEY, accepted.append)
    client = connect(path, KEY, lambda: False)
    server = eventually(lambda: accepted and accepted[0])
    yield client, server
    client.close()
    server.close()
    stop()
    shutil.rmtree(folder)


def test_messages_arrive_in_order_both_ways(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    for number in range(3):
        client.send(("up", number))
        server.send(("down", number))
    assert [server.receive() for _ in range(3)] == [("up", n) for n in range(3)]
    assert [client.receive() for _ in range(3)] == [("down", n) for n in range(3)]


def test_receive_ends_when_the_peer_closes(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    client.close()
    with pytest.raises(ChannelClosed):
        server.receive()


def test_close_wakes_a_thread_that_waits_for_a_message(pair: tuple[Channel, Channel]) -> None:
    client, _ = pair
    ended = threading.Event()

    def wait() -> None:
        try:
            client.receive()
        except ChannelClosed:
            ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    client.close()
    assert ended.wait(5)
    thread.join(5)


def test_a_wrong_key_is_turned_away_and_the_next_caller_served() -> None:
    folder = make_socket_dir()
    path = os.path.join(folder, "s")
    accepted: list[Channel] = []
    stop = serve(path, KEY, accepted.append)
    tries = iter([False, True])
    with pytest.raises(ChannelClosed):
        connect(path, b"wrong", lambda: next(tries))
    client = connect(path, KEY, lambda: False)
    eventually(lambda: len(accepted) == 1)
    client.close()
    stop()
    shutil.rmtree(folder)


def test_socket_folder_is_private_and_short() -> None:
    folder = Path(make_socket_dir())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(str(folder / "frontend-63.sock")) < 107
    folder.rmdir()


def test_a_reader_that_stops_reading_is_stalled_after_its_second(
    pair: tuple[Channel, Channel],
) -> None:
    _, server = pair
    clock = FakeClock()
    outbox = Outbox(server, capacity=4, stall_s=1.0, clock=clock)
    for _ in range(40):
        outbox.put(b"x" * 100_000)
    clock.time_s = 0.9
    assert not outbox.is_stalled()
    clock.time_s = 1.0
    assert outbox.is_stalled()
    outbox.close()


def test_a_reader_that_catches_up_in_time_loses_nothing(pair: tuple[Channel, Channel]) -> None:
    client, server = pair
    clock = FakeClock()
    outbox = Outbox(server, capacity=4, stall_s=1.0, clock=clock)
    for number in range(40):
        outbox.put((number, b"x" * 100_000))
    clock.time_s = 0.9
    assert [client.receive()[0] for _ in range(40)] == list(range(40))
    clock.time_s = 2.0
    eventually(lambda: not outbox.is_stalled())
    outbox.close()


def test_put_after_the_peer_is_gone_neither_blocks_nor_raises(
    pair: tuple[Channel, Channel],
) -> None:
    client, server = pair
    outbox = Outbox(server)
    client.close()
    for _ in range(100):
        outbox.put("lost")
    outbox.close()
    assert not outbox.is_stalled()
