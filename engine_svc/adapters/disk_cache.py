"""Packed adapters on disk: bounded, least recently used out first, verified whenever read.

    DIR/packed/v1/<digest>-<layout>   the packed file, then 32 bytes: the SHA-256 of all before
    DIR/packed/v1/tmp-<pid>-…         being written; those of dead processes are removed at start

A file gets its name by rename when it is whole. Times of use are the files' modification times, so
they outlive a restart. Several engines may share the folder: a file that vanishes is a miss.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from loraplex.status import ResourceExhausted

_TRAILER_BYTES = 32
_CHUNK_BYTES = 1 << 20


class DiskCache:
    """Thread-safe. `max_bytes` bounds finished files; downloads in progress come on top of it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder / "packed" / "v1"
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._evictions = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()

    @property
    def evictions(self) -> int:
        return self._evictions

    def num_bytes(self) -> int:
        """Bytes of all finished files."""
        return sum(size for _, size, _ in self._entries())

    def find(self, key: str) -> int | None:
        """The packed file's size in bytes, None when it is not here."""
        try:
            return max(0, self._path(key).stat().st_size - _TRAILER_BYTES)
        except OSError:
            return None

    def read_into(self, key: str, out: memoryview) -> bool:
        """Copy a packed file of len(out) bytes and verify it; one that is damaged is removed.

        Returns: False when it is missing or was damaged; `out` then holds anything.
        """
        path = self._path(key)
        digest = hashlib.sha256()
        try:
            with path.open("rb", buffering=0) as stream:
                position = 0
                while position < len(out):
                    count = stream.readinto(out[position : position + _CHUNK_BYTES])
                    if not count:
                        break
                    digest.update(out[position : position + count])
                    position += count
                trailer = stream.read(_TRAILER_BYTES + 1)
            os.utime(path)
        except OSError:
            self.remove(key)
            return False
        if position == len(out) and trailer == digest.digest():
            return True
        self.remove(key)
        return False

    def write(
        self, key: str, content: memoryview, is_wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Store a packed file, evicting others for it, also when the disk is fuller than the cache.

        Returns: False when it is larger than the whole cache, or when `is_wanted` turned false on
        the way; nothing is stored then.

        Raises: ResourceExhausted DISK_FULL.
        """
        needed = len(content) + _TRAILER_BYTES
        if needed > self._max_bytes:
            return False
        with self._lock:
            self._make_room(needed, keep=self._path(key).name)
        try:
            return self._store(key, content, is_wanted)
        except ResourceExhausted:
            if not self.reclaim(needed):
                raise
            return self._store(key, content, is_wanted)

    def reclaim(self, num_bytes: int) -> bool:
        """The disk is full: evict files of at least so many bytes. Whether any file went."""
        with self._lock:
            return self._evict(self._entries(), num_bytes) > 0

    def _store(self, key: str, content: memoryview, is_wanted: Callable[[], bool]) -> bool:
        digest = hashlib.sha256()
        with self.temporary() as (path, stream), disk_errors(path):
            for start in range(0, len(content), _CHUNK_BYTES):
                if not is_wanted():
                    return False
                chunk = content[start : start + _CHUNK_BYTES]
                digest.update(chunk)
                stream.write(chunk)
            stream.write(digest.digest())
            stream.flush()
            os.replace(path, self._path(key))
        return True

    def remove(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    @contextlib.contextmanager
    def temporary(self) -> Iterator[tuple[Path, BinaryIO]]:
        """A new file of this folder, removed at the end unless it was renamed.

        Raises: ResourceExhausted DISK_FULL.
        """
        path = self._folder / f"tmp-{os.getpid()}-{secrets.token_hex(8)}"
        with disk_errors(path):
            stream = path.open("xb")
        try:
            yield path, stream
        finally:
            with contextlib.suppress(OSError):
                stream.close()
            with contextlib.suppress(OSError):
                path.unlink()

    def _path(self, key: str) -> Path:
        name = key.removeprefix("sha256:")
        assert name.replace("-", "").isalnum(), key
        return self._folder / name

    def _entries(self) -> list[tuple[float, int, Path]]:
        """(time of use, size, path) of every finished file, oldest first."""
        entries = []
        with contextlib.suppress(OSError), os.scandir(self._folder) as listing:
            for item in listing:
                if not item.name.startswith("tmp-"):
                    with contextlib.suppress(OSError):
                        status = item.stat(follow_symlinks=False)
                        entries.append((status.st_mtime, status.st_size, Path(item.path)))
        return sorted(entries)

    def _make_room(self, needed: int, keep: str) -> None:
        entries = [entry for entry in self._entries() if entry[2].name != keep]
        total = sum(size for _, size, _ in entries)
        self._evict(entries, total + needed - self._max_bytes)

    def _evict(self, entries: list[tuple[float, int, Path]], num_bytes: int) -> int:
        """Remove the first entries until so many bytes are gone; returns the bytes."""
        gone = 0
        for _, size, path in entries:
            if gone >= num_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            self._evictions += 1
            gone += size
        return gone

    def _remove_leftovers(self) -> None:
        for path in self._folder.glob("tmp-*"):
            owner = path.name.split("-")[1]
            if not owner.isdigit() or not _is_alive(int(owner)):
                with contextlib.suppress(OSError):
                    path.unlink()


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Says which folder is full, or unusable, instead of an errno."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = "is full" if full else f"cannot be written: {error.strerror}"
        raise ResourceExhausted(
            f"the disk cache at {path.parent} {problem}; free space, or set --disk-cache-dir",
            reason="DISK_FULL",
            metadata={"field": "disk_cache_dir", "value": str(path.parent), "limit": "free space"},
            retry_after_s=30.0,
        ) from error


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()
