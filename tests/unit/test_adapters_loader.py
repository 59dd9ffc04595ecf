"""The loader over a fake store: one fetch a digest, failures alone, tiers, retries, room."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_svc.adapters.fetch import IN_MEMORY_BYTES
from engine_svc.adapters.folder_weights import FolderWeights
from engine_svc.adapters.host_region import HostRegion
from engine_svc.packed import decode_header
from engine_svc.types import WeightsFailed, WeightsReady
from loraplex.status import AdapterRefused, NameInvalid, Unavailable
from tests.support.loader_bench import (
    BASE,
    LAYOUT,
    RETRY,
    WAIT_S,
    benches,
    wait_until,
)
from tests.support.tiny_adapters import write_adapter


@pytest.fixture
def make(tmp_path):
    yield from benches(tmp_path)


def test_first_load_is_from_the_store_then_host_then_disk(make):
    bench = make()
    first = bench.load("a")
    assert isinstance(first, WeightsReady)
    assert (first.tier, first.num_pages > 0, first.load_s > 0) == ("store", True, True)
    assert bench.header(first).digest == bench.refs["a"].digest
    assert bench.header(first).used_bytes == first.used_bytes
    bench.loader.drop(first.digest)
    again = bench.load("a")
    assert (again.tier, again.span) == ("host", first.span)
    bench.restart()
    third = bench.load("a")
    assert third.tier == "disk"
    assert bench.header(third).digest == bench.refs["a"].digest
    assert len(bench.store.reads) == 1
    assert bench.loader.stats().loads == (("disk", 1),)


def test_concurrent_wants_are_one_fetch_and_one_answer(make):
    bench = make()
    bench.store.gate.clear()
    for rank in range(20):
        bench.want("a", rank)
    bench.store.gate.set()
    assert isinstance(bench.next(), WeightsReady)
    assert len(bench.store.reads) == 1
    assert bench.loader.poll() == ()


def test_want_that_crosses_its_answer_is_not_answered_twice(make):
    bench = make()
    bench.want("a")
    wait_until(lambda: bench.loader.stats().waiting == 0)
    bench.want("a")
    assert len(bench.loader.poll()) == 1
    bench.store.blobs.clear()
    bench.want("b")
    wait_until(lambda: bench.loader.stats().waiting == 0)
    bench.want("b")
    assert len(bench.loader.poll()) == 1


def test_lower_ranks_are_fetched_first_and_a_repeated_want_moves_one_up(make):
    bench = make(("a", "b", "c", "d"), threads=1)
    bench.store.gate.clear()
    bench.want("a", 0)
    wait_until(lambda: bench.store.reads)
    bench.want("b", 3)
    bench.want("c", 2)
    bench.want("d", 4)
    bench.want("d", 1)
    bench.store.gate.set()
    order = [bench.next().digest for _ in range(4)]
    assert order == [bench.refs[name].digest for name in ("a", "d", "c", "b")]


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_every_single_failing_read_is_retried_and_no_other_adapter_fails(make, failing):
    bench = make(threads=1)
    bench.store.fail_at = {failing}
    for name in ("a", "b", "c"):
        assert bench.load(name).tier == "store"
    assert len(bench.store.reads) == 4


@pytest.mark.parametrize("in_memory_bytes", [0, IN_MEMORY_BYTES])
def test_read_that_breaks_off_after_any_chunk_leaves_nothing_behind(make, in_memory_bytes):
    bench = make(("a",), threads=1, in_memory_bytes=in_memory_bytes)
    bench.store._chunk_bytes = 1024
    size = max(len(blob) for blob in bench.store.blobs.values())
    num_chunks = -(-size // 1024)
    for chunk in range(num_chunks):
        seen = []

        def break_off(read, seen=seen, chunk=chunk):
            seen.append(read)
            if len(seen) == chunk + 1:
                raise Unavailable("cut off", reason="BLOB_STORE_UNREACHABLE")

        bench.store.on_chunk = break_off
        ready = bench.load("a")
        assert ready.tier == "store"
        assert len(seen) == chunk + 1 + num_chunks
        bench.loader.drop(ready.digest)
        wait_until(bench.kept)
        assert not list((bench.tmp_path / "disk" / "packed" / "v1").glob("tmp-*"))
        assert bench.loader._residency.try_take(bench.region.num_bytes) is not None
        shutil.rmtree(bench.tmp_path / "disk")
        bench.restart()


def test_random_core_gets_one_answer_for_each_want_and_only_right_bytes(make):
    names = ("a", "b", "c", "d", "e", "f")
    one = make().load("a").span.num_bytes
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    bench = make(names, region_bytes=3 * one, threads=3, max_adapters=3)
    bench.store.fail_at = set(rng.sample(range(1, 200), 40))
    bench.store.corrupt_at = set(rng.sample(range(1, 200), 20))
    outstanding, held, answered = set(), {}, 0
    wanted = 0
    deadline = time.monotonic() + 2 * WAIT_S
    while answered < 150:
        assert time.monotonic() < deadline
        name = rng.choice(names)
        digest = bench.refs[name].digest
        if digest not in held and len(held) + len(outstanding) < 3:
            wanted += digest not in outstanding
            outstanding.add(digest)
            bench.want(name, rng.randrange(5))
        for answer in bench.loader.poll():
            assert answer.digest in outstanding
            outstanding.remove(answer.digest)
            answered += 1
            if isinstance(answer, WeightsReady):
                held[answer.digest] = answer
            else:
                bench.loader._failed.clear()
        if held and rng.random() < 0.3:
            gone = rng.choice(sorted(held))
            assert bench.header(held[gone]).digest == gone
            bench.loader.drop(gone)
            del held[gone]
        bench.loader.check_integrity()
    wait_until(lambda: bench.loader.stats().waiting == 0)
    assert answered + len(bench.loader.poll()) == wanted


def test_store_that_stays_away_fails_that_want_after_the_stated_attempts(make):
    bench = make()
    bench.store.fail_at = set(range(1, 100))
    failed = bench.load("a")
    assert isinstance(failed, WeightsFailed)
    assert (failed.failure.code, failed.failure.reason) == ("UNAVAILABLE", "BLOB_STORE_UNREACHABLE")
    assert failed.failure.retry_after_s == RETRY.remember_unavailable_s
    assert len(bench.store.reads) == RETRY.attempts


def test_store_and_registry_away_still_serve_what_is_on_disk(make):
    bench = make()
    bench.load("a")
    bench.restart()
    bench.store.fail_at = set(range(1, 100))
    bench.manifests.away = True
    assert bench.load("a").tier == "disk"
    assert bench.load("b").failure.reason == "REGISTRY_UNREACHABLE"


def test_failure_is_remembered_so_that_no_storm_follows(make):
    bench = make()
    bench.store.blobs.clear()
    reads = []
    for _ in range(50):
        failed = bench.load("a")
        assert failed.failure.code == "DATA_LOSS"
        reads.append(len(bench.store.reads))
    assert reads[-1] == reads[0] == 1


def test_blob_that_arrives_damaged_once_is_fetched_again(make):
    bench = make()
    bench.store.corrupt_at = {1}
    assert bench.load("a").tier == "store"
    assert len(bench.store.reads) == 2


def test_blob_that_stays_damaged_is_data_loss_of_that_adapter_alone(make):
    bench = make(threads=1)
    bench.store.corrupt_at = {1, 2}
    failed = bench.load("a")
    assert (failed.failure.code, failed.failure.reason) == ("DATA_LOSS", "DIGEST_MISMATCH")
    assert bench.load("b").tier == "store"


def test_damaged_file_on_disk_is_replaced_from_the_store(make):
    bench = make()
    bench.load("a")
    bench.restart()
    (path,) = (bench.tmp_path / "disk" / "packed" / "v1").iterdir()
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0x40
    path.write_bytes(damaged)
    ready = bench.load("a")
    assert ready.tier == "store"
    assert len(bench.store.reads) == 2
    bench.restart()
    assert bench.load("a").tier == "disk"


def test_blob_of_another_size_than_the_manifest_names_is_not_read_to_its_end(make):
    bench = make()
    digest = next(
        file.sha256
        for file in bench.manifests.known[bench.refs["a"].digest].files
        if file.name == "adapter_model.safetensors"
    )
    bench.store.blobs[digest] *= 1000
    chunks = []
    bench.store.on_chunk = chunks.append
    assert bench.load("a").failure.code == "DATA_LOSS"
    assert len(chunks) < 100


def test_dropped_adapters_make_room_and_held_ones_do_not(make):
    one = make().load("a").span.num_bytes
    bench = make(region_bytes=2 * one)
    first, second = bench.load("a"), bench.load("b")
    bench.want("c")
    time.sleep(0.05)
    assert bench.loader.poll() == ()
    assert bench.header(first).digest == bench.refs["a"].digest
    bench.loader.drop(first.digest)
    third = bench.next()
    assert third.digest == bench.refs["c"].digest
    assert bench.header(second).digest == bench.refs["b"].digest
    assert bench.loader.stats().host_evictions == 1


def test_wait_for_room_ends_with_a_stated_limit(make):
    one = make().load("a").span.num_bytes
    bench = make(region_bytes=one, room_wait_s=0.05)
    bench.load("a")
    failed = bench.load("b")
    assert failed.failure.code == "RESOURCE_EXHAUSTED"
    assert "host-cache-bytes" in failed.failure.message


def test_adapter_larger_than_the_host_cache_says_so(make):
    bench = make(region_bytes=4096)
    failed = bench.load("a")
    assert (failed.failure.code, failed.failure.reason) == (
        "FAILED_PRECONDITION", "ADAPTER_TOO_LARGE",
    )  # fmt: skip


def test_count_limit_evicts_what_is_not_held(make):
    bench = make(max_adapters=2)
    for name in ("a", "b", "c"):
        ready = bench.load(name)
        bench.loader.drop(ready.digest)
    stats = bench.loader.stats()
    assert (stats.host_adapters, stats.host_evictions, stats.held_adapters) == (2, 1, 0)


def test_rank_above_the_engine_limit_fails_from_store_and_from_disk(make):
    bench = make()
    bench.load("a")
    bench.restart(max_rank=2)
    for name in ("a", "b"):
        assert bench.load(name).failure.reason == "RANK_UNSUPPORTED"


def test_new_core_gets_no_answers_to_old_wants(make):
    bench = make(threads=1)
    bench.store.gate.clear()
    bench.want("a")
    wait_until(lambda: bench.store.reads)
    bench.want("b")
    bench.loader.forget_core()
    bench.store.gate.set()
    wait_until(lambda: bench.loader.stats().waiting == 0)
    assert bench.loader.poll() == ()
    assert bench.loader.stats().held_adapters == 0
    assert bench.load("a").tier == "host"
    assert bench.load("b").tier == "store"


def test_cached_adapters_give_way_to_a_download_that_the_disk_has_no_room_for(make, monkeypatch):
    bench = make(in_memory_bytes=0)
    assert isinstance(bench.load("a"), WeightsReady)
    wait_until(bench.kept)
    disk, temporary = bench.disk, bench.disk.temporary

    class FullStream:
        """Takes nothing while the cache still holds files."""

        def __init__(self, stream):
            self.stream = stream

        def write(self, chunk):
            if disk.num_bytes():
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.stream.write(chunk)

        def __getattr__(self, name):
            return getattr(self.stream, name)

    @contextlib.contextmanager
    def full():
        with temporary() as (path, stream):
            yield path, FullStream(stream)

    monkeypatch.setattr(disk, "temporary", full)
    loaded = bench.load("b")
    assert isinstance(loaded, WeightsReady)
    assert bench.header(loaded).digest == bench.refs["b"].digest
    assert disk.evictions == 1


def test_disk_too_full_for_the_download_fails_that_adapter_by_name(make, monkeypatch):
    bench = make(in_memory_bytes=0)
    real = Path.open

    def full(path, mode="r", *options, **more):
        if mode == "xb":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, mode, *options, **more)

    monkeypatch.setattr(Path, "open", full)
    failed = bench.load("a")
    assert (failed.failure.code, failed.failure.reason) == ("RESOURCE_EXHAUSTED", "DISK_FULL")
    assert str(bench.tmp_path) in failed.failure.message
    monkeypatch.undo()
    wait_until(lambda: isinstance(bench.load("a"), WeightsReady))


def test_stop_ends_a_download_that_crawls(make):
    bench = make()
    started = threading.Event()

    def crawl(_):
        started.set()
        time.sleep(0.01)

    bench.store.on_chunk = crawl
    bench.store._chunk_bytes = 1
    bench.want("a")
    assert started.wait(WAIT_S)
    bench.loader.stop()
    assert not any(thread.is_alive() for thread in bench.loader._threads)
    assert not list((bench.tmp_path / "disk" / "packed" / "v1").glob("tmp-*"))


def test_crash_inside_a_load_is_an_internal_error_of_that_adapter(make, monkeypatch):
    bench = make(threads=1)

    def explode(chunk):
        raise RuntimeError("secret detail")

    bench.store.on_chunk = explode
    failed = bench.load("a")
    assert failed.failure.code == "INTERNAL"
    assert "secret" not in failed.failure.message
    bench.store.on_chunk = lambda read: None
    assert bench.load("b").tier == "store"


def test_folder_weights_answer_at_once_and_resolve_by_name(tmp_path):
    region = HostRegion.create(tmp_path / "host", 1 << 20)
    weights = FolderWeights(BASE, LAYOUT, region)
    ref = weights.add("mine", write_adapter(tmp_path / "mine"))
    assert weights.names.resolve("mine", "anyone") == ref
    weights.want(ref, 0)
    (ready,) = weights.poll()
    view = region.view(ready.span)
    assert decode_header(view, LAYOUT.digest).digest == ref.digest
    weights.want(SimpleNamespace(name="x", digest="sha256:0"), 0)
    (failed,) = weights.poll()
    assert isinstance(failed, WeightsFailed)
    with pytest.raises(NameInvalid):
        weights.add("mine", tmp_path / "mine")
    foreign = write_adapter(tmp_path / "foreign", config={"base_model_name_or_path": "x"})
    with pytest.raises(AdapterRefused):
        weights.add("foreign", foreign)
