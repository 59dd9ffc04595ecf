"""Watching: revision order is commit order, resuming, heartbeats, limits, the end."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.status import LoraplexError, from_rpc_error
from registry_svc.database import Database
from registry_svc.domain import Alias, Event, EventType
from registry_svc.migrating import migrate
from registry_svc.repository.transaction import Transaction
from registry_svc.service import watch
from registry_svc.service.watch import WatchHub
from tests.support.registry_service import Registry

pytest_plugins = ("tests.support.registry_fixtures",)

WRITERS, WRITES = 6, 15


def test_concurrent_writers_never_show_a_gap_that_later_fills(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits are delayed by random times after their revision is known; readers look all the
    while."""
    rng, assign = random.Random(7), Transaction.assign_revisions
    delays = iter([rng.random() * 0.004 for _ in range(WRITERS * WRITES)])

    def slow(transaction: Transaction) -> int:
        revision = assign(transaction)
        time.sleep(next(delays))
        return revision

    monkeypatch.setattr(Transaction, "assign_revisions", slow)

    def write(writer: int) -> list[int]:
        return [
            database.write(lambda tx: _alias_event(tx, f"w{writer}")).revision
            for _ in range(WRITES)
        ]

    done = threading.Event()

    def read(_: int) -> list[int]:
        seen: list[int] = []
        while True:
            last = done.is_set()
            position = seen[-1] if seen else 0
            events, revision = database.read(
                lambda tx, position=position: (tx.events.after(position, 500), tx.events.revision())
            )
            seen += [event.revision for event in events]
            assert (seen[-1] if seen else 0) == revision, "all up to the revision is there"
            if last:
                return seen

    with ThreadPoolExecutor(WRITERS + 2) as pool:
        readers = [pool.submit(read, number) for number in range(2)]
        written = list(pool.map(write, range(WRITERS)))
        done.set()
        expected = list(range(1, WRITERS * WRITES + 1))
        assert [reader.result() for reader in readers] == [expected, expected]
    assert sorted(itertools.chain.from_iterable(written)) == expected
    assert all(own == sorted(own) for own in written), "each writer's own order"


def _alias_event(tx: Transaction, name: str) -> None:
    tx.publish(Event(EventType.ALIAS_CHANGED, tx.now, alias=Alias(name, "", 0)))


def test_a_failed_write_takes_no_revision(database: Database) -> None:

    def fail(tx: Transaction) -> None:
        _alias_event(tx, "x")
        tx.assign_revisions()
        raise KeyError

    with pytest.raises(KeyError):
        database.write(fail)
    assert database.write(lambda tx: _alias_event(tx, "x")).revision == 1


def test_a_watcher_gets_everything_then_each_change_as_it_comes(registry: Registry) -> None:
    registry.add_base()
    published = registry.publish("sql", registry.adapter(1))
    stream = _watch(registry, 0)
    first = _events_until(stream, 2)
    assert [event.revision for event in first] == [1, 2]
    assert first[0].base_model.name == "tiny-base"
    assert first[1].version == published.version
    registry.call("SetAlias", alias="prod", adapter="sql")
    registry.call("UpdateTenant", tenant=pb.Tenant(name="acme"), update_mask={"paths": ["weight"]})
    third, fourth = _events_until(stream, 4)
    assert (third.type, third.alias.adapter) == (pb.EVENT_TYPE_ALIAS_CHANGED, "sql")
    assert (fourth.type, fourth.tenant.name) == (pb.EVENT_TYPE_TENANT_CHANGED, "acme")
    stream.cancel()
    resumed = _watch(registry, 3)
    assert [event.revision for event in _events_until(resumed, 4)] == [4]
    resumed.cancel()


def test_an_event_shows_the_adapter_as_of_its_revision(registry: Registry) -> None:
    registry.add_base()
    registry.publish("sql", registry.adapter(1))
    registry.publish("sql", registry.adapter(2))
    registry.call("UnregisterAdapter", name="sql", drain_seconds=60)
    registry.clock.advance(61)
    registry.server._adapters.finish_drains()
    stream = _watch(registry, 1)
    events = _events_until(stream, 5)
    stream.cancel()
    assert [event.adapter.current_version for event in events] == [1, 2, 2, 2]
    assert [event.version.version for event in events] == [1, 2, 2, 2]
    states = [event.adapter.state for event in events]
    assert states == [1, 1, pb.ADAPTER_STATE_DRAINING, pb.ADAPTER_STATE_DELETED]
    assert events[-1].type == pb.EVENT_TYPE_ADAPTER_DELETED


def test_a_commit_of_another_process_reaches_the_watcher(registry: Registry) -> None:
    stream = _watch(registry, 0)
    assert next(stream).caught_up_revision == 0
    other = Database(registry.settings.database_url)
    other.write(lambda tx: _alias_event(tx, "elsewhere"))
    other.close()
    assert next(stream).event.alias.alias == "elsewhere"
    stream.cancel()


def test_a_silent_stream_is_told_that_nothing_is_missing(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch.HEARTBEAT_S <= 10
    monkeypatch.setattr(watch, "HEARTBEAT_S", 0.05)
    stream = _watch(registry, 0, engine_id="e1")
    assert [next(stream).caught_up_revision for _ in range(3)] == [0, 0, 0]
    stream.cancel()


def test_a_revision_that_does_not_exist_yet_is_refused(registry: Registry) -> None:
    for revision in (-1, 5):
        with pytest.raises(grpc.RpcError) as caught:
            next(_watch(registry, revision))
        error = from_rpc_error(caught.value)
        assert error.reason == "FIELD_INVALID"
        assert error.metadata["field"] == "from_revision"


def test_only_an_engine_that_says_so_confirms_an_end(registry: Registry) -> None:
    registry.add_base()
    registry.publish("sql", registry.adapter(1))
    streams = [_watch(registry, 0, engine_id=name) for name in ("e1", "e2")]
    for stream in streams:
        _events_until(stream, 2)
    ended = registry.call("UnregisterAdapter", name="sql", drain_seconds=600)
    assert (list(ended.confirmed_by), list(ended.unreachable)) == ([], [])
    for stream in streams:
        _events_until(stream, 3)
        stream.cancel()
    back = _watch(registry, 3, engine_id="e1")
    next(back)
    ended = registry.call("UnregisterAdapter", name="sql")
    assert (list(ended.confirmed_by), list(ended.unreachable)) == (["e1"], [])
    registry.clock.advance(31)
    ended = registry.call("UnregisterAdapter", name="sql")
    assert (list(ended.confirmed_by), list(ended.unreachable)) == (["e1"], ["e2"])
    back.cancel()


def test_one_watcher_too_many_is_told_the_limit_and_a_freed_place_is_reused(
    tmp_path: Any,
) -> None:
    database = Database(f"sqlite:///{tmp_path / 'r.db'}")
    migrate(database)
    hub = WatchHub(database, max_watchers=2)
    streams = [hub.watch(0, "", lambda: True) for _ in range(3)]
    assert [next(stream) for stream in streams[:2]] == [0, 0]
    with pytest.raises(LoraplexError) as caught:
        next(streams[2])
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-watchers" in caught.value.message
    streams[0].close()  # type: ignore[attr-defined]
    assert next(hub.watch(0, "", lambda: True)) == 0
    database.close()


def test_a_cancelled_watcher_gives_its_thread_back(registry: Registry) -> None:
    hub = registry.server._hub
    streams = [_watch(registry, 0) for _ in range(3)]
    for stream in streams:
        next(stream)
    assert hub.watchers == 3
    for stream in streams:
        stream.cancel()
    deadline = time.monotonic() + 10
    while hub.watchers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert hub.watchers == 0


def test_shutdown_ends_the_stream_with_draining(registry: Registry) -> None:
    stream = _watch(registry, 0)
    next(stream)
    registry.server._hub.stop()
    with pytest.raises(grpc.RpcError) as caught:
        next(stream)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")


def _watch(registry: Registry, revision: int, **fields: Any) -> Any:
    request = pb.WatchAdaptersRequest(from_revision=revision, **fields)
    return registry.stub.WatchAdapters(request, timeout=60)


def _events_until(stream: Iterator[Any], revision: int) -> list[Any]:
    """Events up to the word that nothing up to `revision` is missing."""
    events: list[Any] = []
    for item in stream:
        if item.WhichOneof("item") == "event":
            events.append(item.event)
        elif item.caught_up_revision >= revision:
            return events
    raise AssertionError("the stream ended")
