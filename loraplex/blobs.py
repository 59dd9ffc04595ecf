"""Content-addressed blobs in a folder or an S3 bucket; a blob's key is its own SHA-256.

A blob is visible only whole and verified: a folder gets it by rename, a bucket by the last call of
the upload. Memory is bounded by one part (8 MiB) whatever the blob's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from loraplex.blob_content import Readable
from loraplex.file_blobs import FileBlobStore
from loraplex.status import FieldInvalid


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
        # botocore is slow to load
        from loraplex.s3_blobs import S3BlobStore

        return S3BlobStore(parts.netloc, parts.path.strip("/"), s3_endpoint_url)
    raise FieldInvalid("blob store", url, "file:///absolute/folder or s3://bucket/prefix")
