"""The host cache: one sparse file that the loader writes and the core reads, by offset.

Bytes become memory only when a span is first taken, so a large region costs nothing while idle.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from engine_svc.adapters.spans import SpanAllocator
from engine_svc.types import HostSpan
from loraplex.status import ResourceExhausted

SPAN_ALIGN = 4096


class HostRegion:
    """A mapping of the region's file. Only the creator takes and gives back spans."""

    def __init__(self, path: Path, descriptor: int, num_bytes: int, *, writable: bool) -> None:
        self.path, self.num_bytes = path, num_bytes
        self._descriptor = descriptor
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, access)
        self._spans = SpanAllocator(num_bytes, SPAN_ALIGN) if writable else None

    @classmethod
    def create(cls, path: Path, num_bytes: int) -> HostRegion:
        """Create the file, or take over the one of a loader that died: mappings of it stay valid.

        Raises: OSError.
        """
        num_bytes = -(-num_bytes // SPAN_ALIGN) * SPAN_ALIGN
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, num_bytes)
            return cls(path, descriptor, num_bytes, writable=True)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, path: Path) -> HostRegion:
        """Map an existing region read-only. Raises: OSError."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return cls(path, descriptor, os.fstat(descriptor).st_size, writable=False)
        except BaseException:
            os.close(descriptor)
            raise

    def try_take(self, num_bytes: int) -> HostSpan | None:
        """A free span of `num_bytes` backed by memory; None when no gap is large enough.

        Raises: ResourceExhausted DISK_FULL when the file system behind the region is full.
        """
        assert self._spans is not None, "only the creator allocates"
        offset = self._spans.try_take(num_bytes)
        if offset is None:
            return None
        try:
            os.posix_fallocate(self._descriptor, offset, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                self._spans.give_back(offset)
                raise ResourceExhausted(
                    f"the host cache's file system is full: {num_bytes} bytes do not fit at "
                    f"{self.path}; lower --host-cache-bytes or free space",
                    reason="DISK_FULL",
                ) from error
        return HostSpan(offset, num_bytes)

    def try_take_at(self, span: HostSpan) -> bool:
        """Take a span that a loader before this one handed out; its bytes are left as they are."""
        assert self._spans is not None, "only the creator allocates"
        return self._spans.try_take_at(span.offset, span.num_bytes)

    def give_back(self, span: HostSpan) -> None:
        assert self._spans is not None, "only the creator allocates"
        self._spans.give_back(span.offset)

    def view(self, span: HostSpan) -> memoryview:
        """The span's bytes; writable for the creator. Release it before `close`."""
        return memoryview(self._map)[span.offset : span.offset + span.num_bytes]

    def close(self) -> None:
        """Unmap; the file stays. Views that are still held keep the mapping alive."""
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._descriptor)

    def check_integrity(self) -> None:
        if self._spans is not None:
            self._spans.check_integrity()
