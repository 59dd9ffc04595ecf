"""One contract for both blob stores."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.blob_content import CHUNK_BYTES
from loraplex.blobs import BlobStore, open_blob_store
from loraplex.file_blobs import FileBlobStore
from loraplex.s3_blobs import PART_BYTES
from loraplex.status import LoraplexError
from tests.support.registry_service import environment

SMALL = b"small"
LARGE = bytes(range(256)) * (PART_BYTES // 256) * 2 + b"tail"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlobStore]:
    if request.param == "file":
        yield open_blob_store((tmp_path / "a b").as_uri())
        return
    server = request.getfixturevalue("s3_store")
    with environment(server.environment):
        yield open_blob_store(f"s3://{server.bucket}/{tmp_path.name}", server.endpoint_url)


@pytest.mark.parametrize("content", [b"", SMALL, LARGE], ids=["empty", "small", "parts"])
def test_a_blob_comes_back_whole_and_from_any_byte(store: BlobStore, content: bytes) -> None:
    store.check()
    key = _key(content)
    assert not store.contains(key)
    assert store.put(key, io.BytesIO(content), len(content))
    assert not store.put(key, io.BytesIO(content), len(content)), "it was there"
    assert store.contains(key)
    pieces = list(store.chunks(key))
    assert b"".join(pieces) == content
    assert max(map(len, pieces), default=0) <= CHUNK_BYTES
    start = len(content) // 2 + 1
    assert b"".join(store.chunks(key, start)) == content[start:]
    store.delete(key)
    store.delete(key)
    assert not store.contains(key)


def test_a_missing_blob_is_data_loss(store: BlobStore) -> None:
    with pytest.raises(LoraplexError) as caught:
        list(store.chunks(_key(b"missing")))
    assert (caught.value.code.name, caught.value.reason) == ("DATA_LOSS", "DIGEST_MISMATCH")


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "parts"])
def test_other_bytes_are_refused_and_leave_nothing(store: BlobStore, content: bytes) -> None:
    key = _key(content)
    for wrong in (content[:-1], content + b"x", bytes(len(content)), b""):
        with pytest.raises(LoraplexError) as caught:
            store.put(key, io.BytesIO(wrong), len(content))
        assert caught.value.code.name == "DATA_LOSS"
        assert not store.contains(key)
    assert store.discard_partial(0) == 0


def test_a_key_that_is_no_digest_is_refused(store: BlobStore) -> None:
    for key in ("", "../../etc/passwd", "A" * 64, "0" * 63 + "/"):
        with pytest.raises(LoraplexError) as caught:
            store.contains(key)
        assert caught.value.code.name == "INVALID_ARGUMENT"


def test_a_source_that_fails_midway_leaves_nothing(store: BlobStore) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > PART_BYTES:
                raise ConnectionResetError
            return super().read(size)

    with pytest.raises((ConnectionResetError, LoraplexError)):
        store.put(_key(LARGE), Failing(LARGE), len(LARGE))
    assert not store.contains(_key(LARGE))
    assert store.discard_partial(0) == 0


def test_what_a_killed_upload_left_is_discarded_by_age(tmp_path: Path) -> None:
    store = FileBlobStore(tmp_path)
    store.check()
    (tmp_path / "incoming" / "left.over").write_bytes(b"x")
    assert store.discard_partial(3600) == 0
    assert store.discard_partial(0) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_denied(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LoraplexError) as caught:
        FileBlobStore(tmp_path).check()
    tmp_path.chmod(0o700)
    assert caught.value.reason == "BLOB_STORE_DENIED"


def test_a_place_that_is_no_folder_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(LoraplexError) as caught:
        FileBlobStore(tmp_path / "file").check()
    assert caught.value.reason == "BLOB_STORE_UNREACHABLE"


@pytest.mark.parametrize("url", ["", "blobs", "file://host/x", "file:x", "s3://", "http://x/y"])
def test_another_url_is_refused(url: str) -> None:
    with pytest.raises(LoraplexError) as caught:
        open_blob_store(url)
    assert caught.value.reason == "FIELD_INVALID"


def _key(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
