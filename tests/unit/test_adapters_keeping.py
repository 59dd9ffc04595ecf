"""Copies for the disk cache: after the answer, behind whoever waits, never of bytes that move."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import deque

import pytest

from tests.support.loader_bench import WAIT_S, benches, wait_until


@pytest.fixture
def make(tmp_path):
    yield from benches(tmp_path)


class HeldDisk:
    """A disk cache whose writes wait at each chunk until they may go on."""

    def __init__(self, disk, monkeypatch):
        self.writing, self.may_write, self.keys = threading.Event(), threading.Event(), []
        write = disk.write

        def wait(key, content, is_wanted):
            def still_wanted():
                self.writing.set()
                while is_wanted():
                    if self.may_write.wait(0.005):
                        return True
                return False

            self.keys.append(key)
            return write(key, content, still_wanted)

        monkeypatch.setattr(disk, "write", wait)


def size_of_one(make):
    """Bytes of a packed adapter; nothing of it stays on the disk."""
    bench = make()
    size = bench.load("a").span.num_bytes
    wait_until(bench.kept)
    shutil.rmtree(bench.tmp_path / "disk")
    return size


def test_the_answer_goes_out_before_the_disk_cache_has_its_copy(make, monkeypatch):
    bench = make(threads=1)
    held = HeldDisk(bench.disk, monkeypatch)
    ready = bench.load("a")
    assert (ready.tier, bench.header(ready).digest) == ("store", bench.refs["a"].digest)
    assert held.writing.wait(WAIT_S)
    assert bench.disk.num_bytes() == 0
    held.may_write.set()
    wait_until(bench.kept)
    bench.loader.drop(ready.digest)
    bench.restart()
    assert bench.load("a").tier == "disk"


def test_who_comes_while_copies_are_made_is_fetched_at_once(make, monkeypatch):
    bench = make(threads=2)
    held = HeldDisk(bench.disk, monkeypatch)
    bench.load("a")
    assert held.writing.wait(WAIT_S)
    bench.load("b")
    bench.load("c")
    assert len(held.keys) == 1
    held.may_write.set()
    wait_until(bench.kept)
    assert len(held.keys) == 3
    assert len(list((bench.tmp_path / "disk" / "packed" / "v1").iterdir())) == 3


def test_one_thread_makes_copies_though_others_wait(make, monkeypatch):
    bench = make(("a", "b", "c", "d"), threads=1)
    order = []
    fetch, keep = bench.fetcher.fetch, bench.fetcher.keep
    first = threading.Event()

    def fetched(ref, *more):
        assert first.wait(WAIT_S)
        order.append(ref.name)
        return fetch(ref, *more)

    names = {ref.digest: name for name, ref in bench.refs.items()}

    def kept(digest, *more):
        order.append(f"copy of {names[digest]}")
        keep(digest, *more)

    monkeypatch.setattr(bench.fetcher, "fetch", fetched)
    monkeypatch.setattr(bench.fetcher, "keep", kept)
    for rank, name in enumerate("abcd"):
        bench.want(name, rank)
    first.set()
    wait_until(lambda: len(order) == 8)
    assert order == [each for name in "abcd" for each in (name, f"copy of {name}")]


def test_adapters_that_come_and_go_in_a_small_region_reach_the_disk(make):
    """Eight of twelve are wanted at any time, four fit: a fetch is always due."""
    names = [f"n{number}" for number in range(12)]
    bench = make(names, threads=2, max_adapters=4, region_bytes=1 << 24)
    bench.disk._max_bytes = 1 << 28
    name_of = {ref.digest: name for name, ref in bench.refs.items()}
    coming, tiers = deque(names[8:]), []
    for name in names[:8]:
        bench.want(name)
    for _ in range(300):
        ready = bench.next()
        tiers.append(ready.tier)
        bench.loader.drop(ready.digest)
        coming.append(name_of[ready.digest])
        bench.want(coming.popleft())
    assert tiers[200:].count("store") < 20, tiers


def test_what_the_core_holds_keeps_its_bytes_until_the_copy_is_made(make, monkeypatch):
    bench = make(region_bytes=size_of_one(make), threads=2)
    held = HeldDisk(bench.disk, monkeypatch)
    ready = bench.load("a")
    assert held.writing.wait(WAIT_S)
    bench.want("b")
    wait_until(lambda: bench.loader._room_waiters)
    assert not bench.loader.poll()
    assert bench.header(ready).digest == bench.refs["a"].digest
    held.may_write.set()
    wait_until(bench.kept)
    assert bench.disk.find(bench.fetcher._key(bench.refs["a"].digest))
    bench.loader.drop(ready.digest)
    assert bench.next().digest == bench.refs["b"].digest
    bench.loader.check_integrity()


def test_what_nobody_holds_keeps_its_bytes_until_the_copy_is_made(make, monkeypatch):
    bench = make(region_bytes=size_of_one(make), threads=2)
    held = HeldDisk(bench.disk, monkeypatch)
    ready = bench.load("a")
    assert held.writing.wait(WAIT_S)
    bench.loader.drop(ready.digest)
    bench.want("b")
    wait_until(lambda: bench.loader._room_waiters)
    assert bench.header(ready).digest == bench.refs["a"].digest
    held.may_write.set()
    assert bench.next().digest == bench.refs["b"].digest
    wait_until(bench.kept)
    assert bench.disk.find(bench.fetcher._key(bench.refs["a"].digest))
    bench.loader.check_integrity()


def test_a_loader_that_stops_does_not_wait_for_copies(make, monkeypatch):
    bench = make()
    held = HeldDisk(bench.disk, monkeypatch)
    bench.load("a")
    assert held.writing.wait(WAIT_S)
    bench.loader.stop(WAIT_S)
    assert not any(thread.is_alive() for thread in bench.loader._threads)
    assert not list((bench.tmp_path / "disk" / "packed" / "v1").iterdir())


def test_a_copy_that_fails_in_any_way_leaves_the_adapter_served_and_its_room_free(
    make, monkeypatch, caplog
):
    bench = make(region_bytes=size_of_one(make))

    def broken(key, content, is_wanted):
        raise RuntimeError("not a full disk")

    monkeypatch.setattr(bench.disk, "write", broken)
    ready = bench.load("a")
    wait_until(bench.kept)
    assert "disk_cache.write_crashed" in caplog.text
    assert bench.header(ready).digest == bench.refs["a"].digest
    bench.loader.drop(ready.digest)
    assert bench.load("b").digest == bench.refs["b"].digest


def test_what_left_the_region_before_its_copy_is_not_copied(make, monkeypatch):
    bench = make(threads=1, max_adapters=1)
    copied = []
    monkeypatch.setattr(bench.fetcher, "keep", lambda digest, *more: copied.append(digest))
    with monkeypatch.context() as busy:
        busy.setattr(bench.loader, "_most_copies", lambda others_wait: 0)
        ready = bench.load("a")
        bench.loader.drop(ready.digest)
        bench.load("b")
    with bench.loader._changed:
        bench.loader._changed.notify_all()
    wait_until(bench.kept)
    assert copied == [bench.refs["b"].digest]
    bench.loader.check_integrity()


def test_full_disk_costs_the_next_load_a_download_and_this_one_nothing(make, monkeypatch, caplog):
    bench = make()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert bench.load("a").tier == "store"
    wait_until(bench.kept)
    assert "disk_cache.write_failed" in caplog.text
    bench.restart()
    assert bench.load("a").tier == "store"
