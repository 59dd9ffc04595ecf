"""The disk cache: bounded, verified on every read, clean after a crash."""

from __future__ import annotations

import errno
import os
import time

import pytest

from engine_svc.adapters.disk_cache import DiskCache
from loraplex.status import ResourceExhausted

CONTENT = memoryview(bytes(range(256)) * 16)
SIZE = len(CONTENT)


def read(cache, key, size=SIZE):
    out = memoryview(bytearray(size))
    return bytes(out) if cache.read_into(key, out) else None


def test_what_was_written_is_read_back(tmp_path):
    cache = DiskCache(tmp_path, 1 << 20)
    assert cache.write("sha256:aa-l1", CONTENT)
    assert cache.find("sha256:aa-l1") == len(CONTENT)
    assert read(cache, "sha256:aa-l1") == bytes(CONTENT)
    assert read(DiskCache(tmp_path, 1 << 20), "sha256:aa-l1") == bytes(CONTENT)
    assert cache.find("sha256:bb-l1") is None
    assert read(cache, "sha256:bb-l1") is None


@pytest.mark.parametrize("position", [0, 100, len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 31])
def test_one_flipped_bit_anywhere_removes_the_file(tmp_path, position):
    cache = DiskCache(tmp_path, 1 << 20)
    cache.write("sha256:aa-l1", CONTENT)
    path = tmp_path / "packed" / "v1" / "aa-l1"
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 1
    path.write_bytes(damaged)
    assert read(cache, "sha256:aa-l1") is None
    assert cache.find("sha256:aa-l1") is None


@pytest.mark.parametrize("length", [0, 10, 31, 32, 33, len(CONTENT)])
def test_truncated_file_is_removed(tmp_path, length):
    cache = DiskCache(tmp_path, 1 << 20)
    cache.write("sha256:aa-l1", CONTENT)
    os.truncate(tmp_path / "packed" / "v1" / "aa-l1", length)
    assert read(cache, "sha256:aa-l1", cache.find("sha256:aa-l1")) in (None, b"")
    assert read(cache, "sha256:aa-l1") is None


def test_least_recently_used_files_make_room(tmp_path):
    cache = DiskCache(tmp_path, 3 * (len(CONTENT) + 32))
    for index, key in enumerate(("a1", "a2", "a3")):
        cache.write(key, CONTENT)
        os.utime(tmp_path / "packed" / "v1" / key, (index, index))
    assert read(cache, "a1") is not None
    cache.write("a4", CONTENT)
    assert cache.find("a2") is None
    assert all(cache.find(key) for key in ("a1", "a3", "a4"))
    assert cache.num_bytes() <= 3 * (len(CONTENT) + 32)
    assert cache.evictions == 1


def test_file_larger_than_the_cache_is_not_kept(tmp_path):
    cache = DiskCache(tmp_path, 100)
    assert not cache.write("a1", CONTENT)
    assert cache.num_bytes() == 0


def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_kept(tmp_path):
    folder = tmp_path / "packed" / "v1"
    folder.mkdir(parents=True)
    dead = folder / "tmp-999999999-x"
    own, living = (folder / f"tmp-{pid}-x" for pid in (os.getpid(), os.getppid()))
    for path in (dead, own, living):
        path.write_bytes(b"x")
    cache = DiskCache(tmp_path, 1 << 20)
    assert not dead.exists()
    assert not own.exists()
    assert living.exists()
    assert cache.num_bytes() == 0


def test_full_disk_names_the_folder_and_leaves_nothing(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path, 1 << 20)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ResourceExhausted) as raised:
        cache.write("a1", CONTENT)
    assert raised.value.reason == "DISK_FULL"
    assert str(tmp_path) in raised.value.message
    assert list((tmp_path / "packed" / "v1").iterdir()) == []


class FakeDisk:
    """`os.replace` of a disk with room for so many files."""

    def __init__(self, folder, num_files):
        self.folder, self.num_files = folder / "packed" / "v1", num_files
        self.replace = os.replace

    def __call__(self, source, target):
        if len([path for path in self.folder.iterdir() if path != source]) >= self.num_files:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.replace(source, target)


def test_on_a_full_disk_the_least_recently_used_files_make_room(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path, 1 << 20)
    monkeypatch.setattr(os, "replace", FakeDisk(tmp_path, 2))
    for age, key in ((30, "a1"), (20, "a2")):
        assert cache.write(key, CONTENT)
        os.utime(cache._path(key), (time.time() - age,) * 2)
    assert cache.write("a3", CONTENT)
    assert [cache.find(key) is not None for key in ("a1", "a2", "a3")] == [False, True, True]


def test_reclaim_removes_as_many_bytes_as_are_asked_for(tmp_path):
    cache = DiskCache(tmp_path, 1 << 20)
    assert not cache.reclaim(1)
    for age, key in ((30, "a1"), (20, "a2"), (10, "a3")):
        cache.write(key, CONTENT)
        os.utime(cache._path(key), (time.time() - age,) * 2)
    assert cache.reclaim(len(CONTENT) + 33)
    assert [cache.find(key) is not None for key in ("a1", "a2", "a3")] == [False, False, True]
    assert cache.evictions == 2
