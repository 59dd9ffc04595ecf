"""Blobs in a folder (loraplex.blobs.BlobStore): a file gets its name when it is whole and right."""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from loraplex.blob_content import (
    CHUNK_BYTES,
    Readable,
    VerifiedReader,
    check_digest,
    missing_blob,
)
from loraplex.status import ResourceExhausted, Unavailable


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
