"""An in-memory blob store whose calls can be made to fail, stall or lie."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from loraplex.adapter_format import Manifest
from loraplex.status import DataLoss, Unavailable


class FakeBlobStore:
    """`fail_at` are the numbers of the reads (from 1) that raise UNAVAILABLE."""

    def __init__(self, chunk_bytes: int = 4096) -> None:
        self.blobs: dict[str, bytes] = {}
        self.reads: list[str] = []
        self.fail_at: set[int] = set()
        self.corrupt_at: set[int] = set()
        #: called before each chunk with the number of the read
        self.on_chunk: Callable[[int], None] = lambda read: None
        #: reads wait until it is set
        self.gate = threading.Event()
        self.gate.set()
        self._chunk_bytes, self._lock = chunk_bytes, threading.Lock()

    def add_folder(self, manifest: Manifest, files: dict[str, Path]) -> None:
        for file in manifest.files:
            self.blobs[file.sha256] = files[file.name].read_bytes()

    def contains(self, sha256: str) -> bool:
        return sha256 in self.blobs

    def put(self, sha256: str, source: BinaryIO, size_bytes: int) -> bool:
        content = source.read()
        if hashlib.sha256(content).hexdigest() != sha256 or len(content) != size_bytes:
            raise DataLoss("other bytes than named")
        had = sha256 in self.blobs
        self.blobs[sha256] = content
        return not had

    def chunks(self, sha256: str, start: int = 0) -> Iterator[bytes]:
        with self._lock:
            self.reads.append(sha256)
            read = len(self.reads)
        self.gate.wait()
        if read in self.fail_at:
            raise Unavailable("the fake store is away", reason="BLOB_STORE_UNREACHABLE")
        content = self.blobs.get(sha256)
        if content is None:
            raise DataLoss(f"blob {sha256} is missing")
        if read in self.corrupt_at:
            content = content[:-1] + bytes([content[-1] ^ 1])
        for at in range(start, len(content), self._chunk_bytes):
            self.on_chunk(read)
            yield content[at : at + self._chunk_bytes]

    def delete(self, sha256: str) -> None:
        self.blobs.pop(sha256, None)

    def check(self) -> None:
        return None
