"""What is remembered beside the adapters: answers by request id, engines, the audit log."""

from __future__ import annotations

import datetime as dt
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from loraplex.status import Aborted
from registry_svc.domain import EngineLease
from registry_svc.repository.statements import insert_if_absent
from registry_svc.tables import AuditRow, EngineRow, IdempotencyRow


class LedgerRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def recall(self, tenant: str, request_id: str, method: str, fingerprint: str) -> Any | None:
        """The outcome of the same request before.

        Raises: Aborted REQUEST_ID_REUSED: the id came with another request.
        """
        row = self._session.get(IdempotencyRow, (tenant, request_id))
        if row is None:
            return None
        if (row.method, row.fingerprint) != (method, fingerprint):
            raise Aborted(
                f"request_id {request_id!r} was used for another request; draw a new one",
                reason="REQUEST_ID_REUSED",
                metadata={"request_id": request_id},
            )
        return row.outcome

    def remember(
        self,
        tenant: str,
        request_id: str,
        method: str,
        fingerprint: str,
        outcome: Any,
        now: dt.datetime,
    ) -> None:
        values = {
            "tenant": tenant,
            "request_id": request_id,
            "method": method,
            "fingerprint": fingerprint,
            "outcome": outcome,
            "create_time": now,
        }
        insert_if_absent(self._session, IdempotencyRow, values)

    def forget_before(self, time: dt.datetime) -> None:
        self._session.execute(delete(IdempotencyRow).where(IdempotencyRow.create_time < time))

    def see_engine(self, engine_id: str, applied_revision: int | None, now: dt.datetime) -> None:
        """Renew an engine's lease; `applied_revision` where the engine has just told it."""
        row = self._session.get(EngineRow, engine_id)
        if row is None:
            row = EngineRow(id=engine_id, applied_revision=0, first_seen_time=now)
            self._session.add(row)
        row.last_seen_time = now
        if applied_revision is not None:
            row.applied_revision = applied_revision
        self._session.flush()

    def engines(self, seen_after: dt.datetime) -> list[EngineLease]:
        rows = self._session.scalars(
            select(EngineRow).where(EngineRow.last_seen_time > seen_after).order_by(EngineRow.id)
        )
        return [EngineLease(row.id, row.applied_revision, row.last_seen_time) for row in rows]

    def audit(self, tenant: str, action: str, subject: str, detail: Any, now: dt.datetime) -> None:
        self._session.add(
            AuditRow(time=now, tenant=tenant, action=action, subject=subject, detail=detail)
        )
