"""Blobs, and the uploads that refer to them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from sqlalchemy import delete, exists, func, select, update
from sqlalchemy.orm import Session

from registry_svc.domain import BlobState, StoredFile, Upload
from registry_svc.repository.statements import insert_if_absent
from registry_svc.tables import (
    AdapterVersionFileRow,
    AdapterVersionRow,
    BlobRow,
    UploadFileRow,
    UploadRow,
)


class BlobRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def lock_state(self, sha256: str) -> BlobState | None:
        """The blob's state; its row stays locked until the transaction ends."""
        state = self._session.scalars(
            select(BlobRow.state).where(BlobRow.sha256 == sha256).with_for_update()
        ).one_or_none()
        return BlobState(state) if state else None

    def announce(self, file: StoredFile, now: dt.datetime) -> bool:
        """Have a row before any byte is written; True: it is new."""
        values = {
            "sha256": file.sha256,
            "size_bytes": file.size_bytes,
            "state": BlobState.UPLOADING.value,
            "create_time": now,
        }
        return insert_if_absent(self._session, BlobRow, values)

    def set_state(self, sha256: str, state: BlobState) -> None:
        self._session.execute(
            update(BlobRow).where(BlobRow.sha256 == sha256).values(state=state.value)
        )

    def remove(self, sha256: str) -> None:
        self._session.execute(delete(BlobRow).where(BlobRow.sha256 == sha256))

    def is_referenced(self, sha256: str, now: dt.datetime) -> bool:
        """Whether a version that is not retired, or an upload that has not expired, has it."""
        by_version = (
            select(AdapterVersionFileRow.sha256)
            .join(
                AdapterVersionRow,
                (AdapterVersionRow.adapter == AdapterVersionFileRow.adapter)
                & (AdapterVersionRow.version == AdapterVersionFileRow.version),
            )
            .where(AdapterVersionFileRow.sha256 == sha256, AdapterVersionRow.retired.is_(False))
        )
        by_upload = (
            select(UploadFileRow.sha256)
            .join(UploadRow, UploadRow.id == UploadFileRow.upload_id)
            .where(UploadFileRow.sha256 == sha256, UploadRow.expire_time > now)
        )
        return any(
            self._session.scalars(select(exists(query))).one() for query in (by_version, by_upload)
        )

    def list_digests(self, after: str, limit: int) -> list[str]:
        query = select(BlobRow.sha256).where(BlobRow.sha256 > after)
        return list(self._session.scalars(query.order_by(BlobRow.sha256).limit(limit)))

    def total_bytes(self) -> int:
        stored = BlobRow.state == BlobState.STORED.value
        total = func.coalesce(func.sum(BlobRow.size_bytes), 0)
        return int(self._session.scalars(select(total).where(stored)).one())

    def add_upload(self, upload: Upload, now: dt.datetime) -> None:
        self._session.add(
            UploadRow(
                id=upload.id,
                tenant=upload.tenant,
                create_time=now,
                expire_time=upload.expire_time,
            )
        )
        self._session.flush()
        for file in upload.files:
            self._session.add(
                UploadFileRow(
                    upload_id=upload.id,
                    name=file.name,
                    size_bytes=file.size_bytes,
                    sha256=file.sha256,
                )
            )
        self._session.flush()

    def get_upload(self, upload_id: str, *, lock: bool = False) -> Upload | None:
        query = select(UploadRow).where(UploadRow.id == upload_id)
        row = self._session.scalars(query.with_for_update() if lock else query).one_or_none()
        if row is None:
            return None
        files = self._session.scalars(
            select(UploadFileRow)
            .where(UploadFileRow.upload_id == upload_id)
            .order_by(UploadFileRow.name)
        )
        stored = tuple(StoredFile(file.name, file.size_bytes, file.sha256) for file in files)
        return Upload(row.id, row.tenant, row.expire_time, stored)

    def extend_upload(self, upload_id: str, expire_time: dt.datetime) -> None:
        self._session.execute(
            update(UploadRow).where(UploadRow.id == upload_id).values(expire_time=expire_time)
        )
        self._session.expire_all()

    def remove_uploads(self, upload_ids: Sequence[str]) -> None:
        self._session.execute(delete(UploadFileRow).where(UploadFileRow.upload_id.in_(upload_ids)))
        self._session.execute(delete(UploadRow).where(UploadRow.id.in_(upload_ids)))

    def expired_uploads(self, now: dt.datetime, limit: int) -> list[str]:
        query = select(UploadRow.id).where(UploadRow.expire_time <= now)
        return list(self._session.scalars(query.order_by(UploadRow.id).limit(limit)))
