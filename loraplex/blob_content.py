"""What every blob store checks of keys and bytes."""

from __future__ import annotations

import hashlib
from typing import Protocol

from loraplex.status import DataLoss, FieldInvalid

CHUNK_BYTES = 1024 * 1024
_HEX = frozenset("0123456789abcdef")


class Readable(Protocol):
    """What a blob is read from: an open file, or a stream."""

    def read(self, size: int, /) -> bytes: ...


class VerifiedReader:
    """Reads a source in pieces and knows at its end whether digest and size were as promised."""

    def __init__(self, source: Readable, sha256: str, size_bytes: int) -> None:
        self._source, self._sha256, self._size_bytes = source, sha256, size_bytes
        self._hash, self._seen = hashlib.sha256(), 0

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end. Raises: DataLoss: more than promised."""
        pieces, missing = [], size
        while missing and (piece := self._source.read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        block = b"".join(pieces)
        self._hash.update(block)
        self._seen += len(block)
        if self._seen > self._size_bytes:
            self._fail(f"more than the announced {self._size_bytes} bytes")
        return block

    def verify(self) -> None:
        """Raises: DataLoss: what was read is not the blob."""
        if self._seen != self._size_bytes:
            self._fail(f"{self._seen} of {self._size_bytes} bytes")
        if (found := self._hash.hexdigest()) != self._sha256:
            self._fail(f"bytes with the digest {found}")

    def _fail(self, what: str) -> None:
        raise DataLoss(
            f"blob {self._sha256}: received {what}; send the file again",
            metadata={"sha256": self._sha256},
        )


def check_digest(sha256: str) -> None:
    """Raises: FieldInvalid: not 64 lower-case hex digits (such a key could name any path)."""
    if len(sha256) != 64 or not _HEX.issuperset(sha256):
        raise FieldInvalid("sha256", sha256, "64 lower-case hex digits")


def missing_blob(sha256: str) -> DataLoss:
    return DataLoss(
        f"blob {sha256} is not in the blob store; publish its adapter again",
        metadata={"sha256": sha256},
    )
