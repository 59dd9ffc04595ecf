"""Tenants."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from registry_svc.domain import Tenant
from registry_svc.repository.statements import insert_if_absent
from registry_svc.tables import TenantRow


class TenantRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, name: str, *, lock: bool = False) -> Tenant | None:
        row = self._row(name, lock)
        return _domain(row) if row else None

    def ensure(self, name: str) -> bool:
        """Have the tenant; True: it is new, with the defaults of a Tenant."""
        new = Tenant(name)
        values = {
            "name": new.name,
            "weight": new.weight,
            "max_queued_requests": new.max_queued_requests,
            "max_queued_tokens": new.max_queued_tokens,
            "generation": new.generation,
        }
        return insert_if_absent(self._session, TenantRow, values)

    def save(self, tenant: Tenant) -> None:
        row = self._row(tenant.name, lock=True)
        assert row is not None, "save follows a locking get"
        row.weight = tenant.weight
        row.max_queued_requests = tenant.max_queued_requests
        row.max_queued_tokens = tenant.max_queued_tokens
        row.generation = tenant.generation
        self._session.flush()

    def _row(self, name: str, lock: bool) -> TenantRow | None:
        query = select(TenantRow).where(TenantRow.name == name)
        return self._session.scalars(query.with_for_update() if lock else query).one_or_none()


def _domain(row: TenantRow) -> Tenant:
    return Tenant(
        name=row.name,
        weight=row.weight,
        max_queued_requests=row.max_queued_requests,
        max_queued_tokens=row.max_queued_tokens,
        generation=row.generation,
    )
