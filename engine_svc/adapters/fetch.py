"""One adapter from store or disk into the host region: the work of a loader's thread.

    disk cache hit                       verified copy into the region
    miss → manifest → weights file       downloaded into memory (a large one beside the disk cache),
                                         digest verified on the way
         → targets → packed              written into the region

`keep` then puts what came from the store into the disk cache; nobody waits for that. Only a blob
that arrives damaged is fetched again here, once; `Loader` decides about all else.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from engine_svc.adapters.disk_cache import DiskCache, disk_errors
from engine_svc.adapters.packer import plan_packing, write_packed
from engine_svc.layout import AdapterLayout
from engine_svc.packed import PackedFileInvalid, PackedHeader, check_packed, decode_header
from engine_svc.types import AdapterRef, HostSpan
from loraplex.adapter_format import (
    WEIGHTS_FILE,
    BaseModelFacts,
    Manifest,
    ManifestFile,
    adapter_parts,
)
from loraplex.blobs import BlobStore
from loraplex.status import DataLoss, FailedPrecondition, ResourceExhausted

log = logging.getLogger(__name__)

#: Fetched.tier of what came from the store
FROM_STORE = "store"
#: of one blob whose bytes do not have its digest, before that is called data loss
_DOWNLOADS = 2
#: blobs of up to so many bytes are downloaded into memory, one by each thread of the loader: 2 GiB
#: at most for the eight of a large machine
IN_MEMORY_BYTES = 256 << 20


class Manifests(Protocol):
    """Where a version's manifest comes from; a call may ask the registry."""

    def manifest(self, ref: AdapterRef) -> Manifest:
        """Raises: NotFound, Unavailable REGISTRY_UNREACHABLE."""
        ...


class Room(Protocol):
    """Space in the host region."""

    def take(self, num_bytes: int) -> HostSpan:
        """Wait for a span. Raises: Abandoned; FailedPrecondition ADAPTER_TOO_LARGE when it can
        never fit; ResourceExhausted DISK_FULL."""
        ...

    def give_back(self, span: HostSpan) -> None: ...

    def view(self, span: HostSpan) -> memoryview: ...


class Abandoned(Exception):
    """Nobody waits for this adapter any more."""


@dataclass(frozen=True, slots=True)
class Fetched:
    span: HostSpan
    num_pages: int
    used_bytes: int
    tier: str


class Fetcher:
    """Brings packed adapters of one layout; safe to call from several threads."""

    def __init__(
        self,
        store: BlobStore,
        manifests: Manifests,
        disk: DiskCache,
        base: BaseModelFacts,
        layout: AdapterLayout,
        max_rank: int,
        in_memory_bytes: int = IN_MEMORY_BYTES,
    ) -> None:
        self._store, self._manifests, self._disk = store, manifests, disk
        self._base, self._layout, self._max_rank = base, layout, max_rank
        self._in_memory_bytes = in_memory_bytes

    def fetch(self, ref: AdapterRef, room: Room, is_wanted: Callable[[], bool]) -> Fetched:
        """Bring one adapter into `room`.

        Raises: any LoraplexError; Abandoned when `is_wanted` turned false on the way.
        """
        cached = self._from_disk(self._key(ref.digest), ref.digest, room)
        if cached is not None:
            return cached
        manifest = self._manifests.manifest(ref)
        if manifest.digest != ref.digest:
            raise DataLoss(
                f"adapter {ref.name!r}: the registry's manifest has digest {manifest.digest}, "
                f"expected {ref.digest}"
            )
        weights = _weights_file(manifest, ref)
        for _ in range(_DOWNLOADS):
            if weights.size_bytes <= self._in_memory_bytes:
                content = self._into_memory(weights, is_wanted)
                if content is not None:
                    return self._pack(ref, manifest, content, room)
                continue
            with self._disk.temporary() as (path, stream):
                if self._download(weights, path, stream, is_wanted):
                    return self._pack(ref, manifest, path, room)
        raise DataLoss(
            f"adapter {ref.name!r}: blob {weights.sha256} does not have the digest that names it, "
            "twice in a row; publish the adapter again",
            metadata={"sha256": weights.sha256, "adapter": ref.name},
        )

    def keep(self, digest: str, content: memoryview, is_wanted: Callable[[], bool]) -> None:
        """Put a packed adapter into the disk cache, unless `is_wanted` turns false on the way. A
        full disk costs a later load a download."""
        key = self._key(digest)
        try:
            self._disk.write(key, content, is_wanted)
        except ResourceExhausted as error:
            log.warning("disk_cache.write_failed", extra={"key": key, "cause": error.message})

    def _key(self, digest: str) -> str:
        return f"{digest}-{self._layout.digest[:16]}"

    def _from_disk(self, key: str, digest: str, room: Room) -> Fetched | None:
        size = self._disk.find(key)
        if not size:
            return None
        span = room.take(size)
        try:
            view = room.view(span)
            if self._disk.read_into(key, view):
                header = decode_header(view, self._layout.digest)
                check_packed(view, header, self._layout)
                if header.digest == digest:
                    self._check_rank(header)
                    return Fetched(span, header.num_pages, header.used_bytes, "disk")
        except PackedFileInvalid:
            pass
        except BaseException:
            room.give_back(span)
            raise
        self._disk.remove(key)
        room.give_back(span)
        return None

    def _check_rank(self, header: PackedHeader) -> None:
        rank = int(header.arrays["rank"].max())
        if rank > self._max_rank:
            raise FailedPrecondition(
                f"the adapter's largest rank is {rank}; this engine's --max-lora-rank is "
                f"{self._max_rank}",
                reason="RANK_UNSUPPORTED",
                metadata={"field": "rank", "value": str(rank), "limit": str(self._max_rank)},
            )

    def _into_memory(self, file: ManifestFile, is_wanted: Callable[[], bool]) -> memoryview | None:
        """The blob's bytes; None when they do not have its digest."""
        content, end = np.empty(file.size_bytes, np.uint8), 0

        def add(chunk: bytes) -> None:
            nonlocal end
            start, end = end, end + len(chunk)
            content[start:end] = np.frombuffer(chunk, np.uint8)

        return content.data.toreadonly() if self._receive(file, add, is_wanted) else None

    def _download(
        self, file: ManifestFile, path: Path, stream: BinaryIO, is_wanted: Callable[[], bool]
    ) -> bool:
        """Whether the blob arrived with the right digest. On a full disk cached adapters give way.

        Raises: ResourceExhausted DISK_FULL.
        """
        try:
            return self._try_download(file, path, stream, is_wanted)
        except ResourceExhausted:
            if not self._disk.reclaim(file.size_bytes):
                raise
        with disk_errors(path):
            stream.seek(0)
            stream.truncate()
        return self._try_download(file, path, stream, is_wanted)

    def _try_download(
        self, file: ManifestFile, path: Path, stream: BinaryIO, is_wanted: Callable[[], bool]
    ) -> bool:
        def write(chunk: bytes) -> None:
            with disk_errors(path):
                stream.write(chunk)

        is_right = self._receive(file, write, is_wanted)
        with disk_errors(path):
            stream.flush()
        return is_right

    def _receive(
        self, file: ManifestFile, take: Callable[[bytes], None], is_wanted: Callable[[], bool]
    ) -> bool:
        """Whether the blob arrived with the right digest; `take` gets no more than its size."""
        digest, size = hashlib.sha256(), 0
        for chunk in self._store.chunks(file.sha256):
            if not is_wanted():
                raise Abandoned
            size += len(chunk)
            if size > file.size_bytes:
                return False
            digest.update(chunk)
            take(chunk)
        return size == file.size_bytes and digest.hexdigest() == file.sha256

    def _pack(
        self, ref: AdapterRef, manifest: Manifest, weights: Path | memoryview, room: Room
    ) -> Fetched:
        # whole modules were held to the registry's own limit
        parts = adapter_parts(
            manifest.options, weights, self._base, max_rank=self._max_rank, max_saved_bytes=1 << 62
        )
        plan = plan_packing(parts, self._layout, ref.digest)
        span = room.take(plan.num_bytes)
        try:
            write_packed(plan, weights, room.view(span))
        except BaseException:
            room.give_back(span)
            raise
        return Fetched(span, plan.num_pages, plan.used_bytes, FROM_STORE)


def _weights_file(manifest: Manifest, ref: AdapterRef) -> ManifestFile:
    for file in manifest.files:
        if file.name == WEIGHTS_FILE:
            return file
    raise FailedPrecondition(
        f"adapter {ref.name!r}: its manifest names no {WEIGHTS_FILE}", reason="WEIGHTS_INVALID"
    )
