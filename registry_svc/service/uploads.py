"""Use cases of uploads: announce files, receive blobs."""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapter_format.manifest import is_file_name
from loraplex.blob_content import Readable, check_digest
from loraplex.blobs import BlobStore
from loraplex.status import FieldInvalid, NotFound
from registry_svc.database import Database
from registry_svc.domain import BlobState, Caller, StoredFile, Upload
from registry_svc.repository.transaction import Transaction
from registry_svc.sources import check_total

MAX_FILES = 256


@dataclass(frozen=True, slots=True)
class Uploads:
    """An upload is a reference to its blobs until it expires; each blob received renews it."""

    database: Database
    store: BlobStore
    max_adapter_bytes: int
    ttl: dt.timedelta

    def start(self, caller: Caller, files: Sequence[StoredFile]) -> tuple[Upload, tuple[str, ...]]:
        """Open an upload. Returns: it, and the digests of the blobs that must be sent."""
        _check_files(files)
        check_total(sum(file.size_bytes for file in files), self.max_adapter_bytes)

        def use_case(tx: Transaction) -> tuple[Upload, tuple[str, ...]]:
            upload = Upload(secrets.token_hex(16), caller.tenant, tx.now + self.ttl, tuple(files))
            tx.blobs.add_upload(upload, tx.now)
            missing = []
            for file in sorted(_distinct(files), key=lambda file: file.sha256):
                tx.blobs.announce(file, tx.now)
                if tx.blobs.lock_state(file.sha256) is not BlobState.STORED:
                    missing.append(file.sha256)
            return upload, tuple(missing)

        return self.database.write(use_case).value

    def receive(
        self, caller: Caller, upload_id: str, sha256: str, size_bytes: int, source: Readable
    ) -> bool:
        """Store one blob of an upload; False: the store had it.

        Raises: NotFound UPLOAD_NOT_FOUND, also when it expired while the bytes came; FieldInvalid;
        DataLoss DIGEST_MISMATCH; Unavailable.
        """
        file = self._announced(caller, upload_id, sha256, size_bytes)
        if self._begin(file):
            return False
        stored = self.store.put(sha256, source, size_bytes)

        def finish(tx: Transaction) -> bool:
            # the row first: bytes without a row would never be collected
            tx.blobs.announce(file, tx.now)
            if tx.blobs.lock_state(sha256) is BlobState.DELETING:
                return False
            if not is_live(tx, caller, upload_id):
                return False
            tx.blobs.set_state(sha256, BlobState.STORED)
            return True

        if not self.database.write(finish).value:
            raise upload_not_found(upload_id)
        return stored

    def _announced(
        self, caller: Caller, upload_id: str, sha256: str, size_bytes: int
    ) -> StoredFile:
        check_digest(sha256)

        def use_case(tx: Transaction) -> StoredFile:
            upload = live_upload(tx, caller, upload_id, lock=True)
            found = next((file for file in upload.files if file.sha256 == sha256), None)
            if found is None:
                raise FieldInvalid("sha256", sha256, "one of the files given to StartUpload")
            if found.size_bytes != size_bytes:
                raise FieldInvalid("size_bytes", size_bytes, f"{found.size_bytes}, as announced")
            tx.blobs.extend_upload(upload.id, tx.now + self.ttl)
            return found

        return self.database.write(use_case).value

    def _begin(self, file: StoredFile) -> bool:
        """Have the blob's row ready for bytes; True: the blob is stored already. A deletion that
        was begun is finished first, under the row's lock."""

        def use_case(tx: Transaction) -> bool:
            if tx.blobs.lock_state(file.sha256) is BlobState.DELETING:
                self.store.delete(file.sha256)
                tx.blobs.set_state(file.sha256, BlobState.UPLOADING)
            tx.blobs.announce(file, tx.now)
            return tx.blobs.lock_state(file.sha256) is BlobState.STORED

        return self.database.write(use_case).value


def live_upload(tx: Transaction, caller: Caller, upload_id: str, *, lock: bool = False) -> Upload:
    """Raises: NotFound UPLOAD_NOT_FOUND: unknown, another tenant's, or expired."""
    known = len(upload_id) == 32 and upload_id.isalnum() and upload_id.isascii()
    upload = tx.blobs.get_upload(upload_id, lock=lock) if known else None
    if upload is None or upload.tenant != caller.tenant or upload.expire_time <= tx.now:
        raise upload_not_found(upload_id)
    return upload


def is_live(tx: Transaction, caller: Caller, upload_id: str) -> bool:
    try:
        live_upload(tx, caller, upload_id)
    except NotFound:
        return False
    return True


def upload_not_found(upload_id: str) -> NotFound:
    return NotFound(
        f"upload {upload_id[:64]!r} does not exist or has expired; start another",
        reason="UPLOAD_NOT_FOUND",
        metadata={"upload_id": upload_id[:64]},
    )


def _check_files(files: Sequence[StoredFile]) -> None:
    if not 1 <= len(files) <= MAX_FILES:
        raise FieldInvalid("files", f"{len(files)} files", f"1 to {MAX_FILES}")
    if len({file.name for file in files}) != len(files):
        raise FieldInvalid("files", "a name twice", "names that differ")
    sizes: dict[str, int] = {}
    for file in files:
        if not is_file_name(file.name):
            raise FieldInvalid("files.name", file.name, "a plain file name, no directory part")
        check_digest(file.sha256)
        if file.size_bytes < 0:
            raise FieldInvalid("files.size_bytes", file.size_bytes, "at least 0")
        if sizes.setdefault(file.sha256, file.size_bytes) != file.size_bytes:
            raise FieldInvalid("files.size_bytes", file.size_bytes, "one size for one digest")


def _distinct(files: Sequence[StoredFile]) -> list[StoredFile]:
    return list({file.sha256: file for file in files}.values())
