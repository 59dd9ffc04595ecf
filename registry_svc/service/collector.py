"""Garbage collection: blobs that no version and no live upload refers to."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from loraplex.blobs import BlobStore
from registry_svc.database import Database
from registry_svc.domain import BlobState
from registry_svc.repository.transaction import Transaction

BATCH = 500
#: Answers by request id are remembered for so long.
IDEMPOTENCY_TTL = dt.timedelta(days=1)
#: Bytes of an upload that broke off are kept for so long.
PARTIAL_AGE_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Collected:
    blobs: int
    uploads: int
    partial: int


@dataclass(frozen=True, slots=True)
class Collector:
    """A blob goes in two steps: its row is marked under its lock when nothing refers to it, then,
    again under the lock, the bytes and the row are removed. A crash between leaves a mark that the
    next run, or the next upload of that blob, finishes."""

    database: Database
    store: BlobStore

    def collect(self, partial_age_s: float = PARTIAL_AGE_S) -> Collected:
        uploads = self._forget_uploads()
        blobs, after = 0, ""
        while digests := self._digests(after):
            blobs += sum(self._collect_one(sha256) for sha256 in digests)
            after = digests[-1]
        return Collected(blobs, uploads, self.store.discard_partial(partial_age_s))

    def _digests(self, after: str) -> list[str]:
        return self.database.read(lambda tx: tx.blobs.list_digests(after, BATCH))

    def _forget_uploads(self) -> int:
        def use_case(tx: Transaction) -> int:
            expired = tx.blobs.expired_uploads(tx.now, BATCH)
            tx.blobs.remove_uploads(expired)
            tx.ledger.forget_before(tx.now - IDEMPOTENCY_TTL)
            return len(expired)

        total = 0
        while count := self.database.write(use_case).value:
            total += count
        return total

    def _collect_one(self, sha256: str) -> bool:
        if self.database.read(lambda tx: tx.blobs.is_referenced(sha256, tx.now)):
            return False

        def mark(tx: Transaction) -> bool:
            state = tx.blobs.lock_state(sha256)
            if state is None or tx.blobs.is_referenced(sha256, tx.now):
                return False
            tx.blobs.set_state(sha256, BlobState.DELETING)
            return True

        def remove(tx: Transaction) -> bool:
            if tx.blobs.lock_state(sha256) is not BlobState.DELETING:
                return False
            self.store.delete(sha256)
            if tx.blobs.is_referenced(sha256, tx.now):
                tx.blobs.set_state(sha256, BlobState.UPLOADING)
            else:
                tx.blobs.remove(sha256)
            return True

        return self.database.write(mark).value and self.database.write(remove).value
