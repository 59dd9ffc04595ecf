"""Content-addressed blobs in a folder or an S3 bucket; a blob's key is its own SHA-256.

A blob is visible only whole and verified: a folder gets it by rename, a bucket by the last call of
the upload. Memory is bounded by one part (8 MiB) whatever the blob's size.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from loraplex.status import DataLoss, FieldInvalid, ResourceExhausted, Unavailable

CHUNK_BYTES = 1024 * 1024
_HEX = frozenset("0123456789abcdef")


class Readable(Protocol):
    """What a blob is read from: an open file, or a stream."""

    def read(self, size: int, /) -> bytes: ...


class BlobStore(Protocol):
    """Where blobs lie. Every method raises Unavailable when the store cannot be reached
    (BLOB_STORE_UNREACHABLE) or refuses the credentials (BLOB_STORE_DENIED)."""

    def contains(self, sha256: str) -> bool: ...

    def put(self, sha256: str, source: Readable, size_bytes: int) -> bool:
        """Store `source`; False: the blob was there already.

        Raises: DataLoss: the bytes do not have this digest or size; nothing is stored.
        """
        ...

    def chunks(self, sha256: str, start: int = 0) -> Iterator[bytes]:
        """The blob's bytes from `start` on, at most 1 MiB each.

        Raises: DataLoss: there is no such blob.
        """
        ...

    def delete(self, sha256: str) -> None:
        """Remove the blob; one that is not there is no error."""
        ...

    def discard_partial(self, age_s: float) -> int:
        """Remove what uploads that broke off at least `age_s` ago left. Returns: how many."""
        ...

    def check(self) -> None:
        """Return when the store can be reached and used."""
        ...


def open_blob_store(url: str, s3_endpoint_url: str | None = None) -> BlobStore:
    """The store at `file:///absolute/folder` or `s3://bucket/prefix`.

    Raises: FieldInvalid: any other URL.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
        return FileBlobStore(Path(unquote(parts.path)))
    if parts.scheme == "s3" and parts.netloc:
        from loraplex.s3_blobs import S3BlobStore

        return S3BlobStore(parts.netloc, parts.path.strip("/"), s3_endpoint_url)
    raise FieldInvalid("blob store", url, "file:///absolute/folder or s3://bucket/prefix")


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


class FileBlobStore:
    """Blobs as `sha256/ab/abcd…` in a folder, which is made when the first blob comes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, sha256: str) -> Path:
        """Where the blob's file lies, whether it exists or not."""
        check_digest(sha256)
        return self.root / "sha256" / sha256[:2] / sha256

    def contains(self, sha256: str) -> bool:
        return self.path(sha256).is_file()

    def put(self, sha256: str, source: Readable, size_bytes: int) -> bool:
        target = self.path(sha256)
        if target.is_file():
            return False
        partial = self.root / "incoming" / f"{sha256}.{secrets.token_hex(8)}"
        try:
            partial.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_verified(partial, VerifiedReader(source, sha256, size_bytes))
            partial.replace(target)
            _sync_folder(target.parent)
        except OSError as error:
            raise self._failure(error) from error
        finally:
            partial.unlink(missing_ok=True)
        return True

    def chunks(self, sha256: str, start: int = 0) -> Iterator[bytes]:
        try:
            with self.path(sha256).open("rb") as blob:
                blob.seek(start)
                while block := blob.read(CHUNK_BYTES):
                    yield block
        except FileNotFoundError as error:
            raise missing_blob(sha256) from error
        except OSError as error:
            raise self._failure(error) from error

    def delete(self, sha256: str) -> None:
        try:
            self.path(sha256).unlink(missing_ok=True)
        except OSError as error:
            raise self._failure(error) from error

    def discard_partial(self, age_s: float) -> int:
        count = 0
        try:
            for partial in self.root.glob("incoming/*"):
                if time.time() - partial.stat().st_mtime >= age_s:
                    partial.unlink(missing_ok=True)
                    count += 1
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._failure(error) from error
        return count

    def check(self) -> None:
        probe = self.root / "incoming" / f"probe.{secrets.token_hex(8)}"
        try:
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> Unavailable | ResourceExhausted:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ResourceExhausted(f"no space left in {self.root}", reason="DISK_FULL")
        denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        return Unavailable(
            f"blob store {self.root}: {error.strerror or error}",
            reason="BLOB_STORE_DENIED" if denied else "BLOB_STORE_UNREACHABLE",
            metadata={"store": f"file://{self.root}"},
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


def _write_verified(path: Path, reader: VerifiedReader) -> None:
    with path.open("xb") as out:
        while block := reader.read(CHUNK_BYTES):
            out.write(block)
        reader.verify()
        out.flush()
        os.fsync(out.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
