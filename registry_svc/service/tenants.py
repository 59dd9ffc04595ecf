"""Use cases of tenants."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from loraplex.status import NotFound
from registry_svc.database import Database
from registry_svc.domain import Caller, Event, EventType, Tenant
from registry_svc.names import check_name
from registry_svc.repository.transaction import Transaction
from registry_svc.service.lookup import check_etag


@dataclass(frozen=True, slots=True)
class Tenants:
    database: Database

    def get(self, name: str) -> Tenant:
        """Raises: NotFound TENANT_NOT_FOUND."""
        check_name("name", name)

        def use_case(tx: Transaction) -> Tenant:
            found = tx.tenants.get(name)
            if found is None:
                raise NotFound(
                    f"tenant {name!r} does not exist; `registryctl tenant update {name}` makes it",
                    reason="TENANT_NOT_FOUND",
                    metadata={"tenant": name},
                )
            return found

        return self.database.read(use_case)

    def update(self, caller: Caller, name: str, etag: str, changes: dict[str, object]) -> Tenant:
        """Set the given fields of a tenant, which is made when it is not there."""
        check_name("tenant.name", name)

        def use_case(tx: Transaction) -> Tenant:
            created = tx.tenants.ensure(name)
            tenant = tx.tenants.get(name, lock=True)
            assert tenant is not None, "ensure made it"
            check_etag(etag, tenant.etag, f"tenant {name!r}")
            changed = dataclasses.replace(tenant, **changes)  # type: ignore[arg-type]
            if changed == tenant and not created:
                return tenant
            if not created:
                changed = dataclasses.replace(changed, generation=tenant.generation + 1)
            tx.tenants.save(changed)
            tx.publish(Event(EventType.TENANT_CHANGED, tx.now, tenant=changed))
            tx.ledger.audit(caller.tenant, "tenant.updated", name, sorted(changes), tx.now)
            return changed

        return self.database.write(use_case).value


def ensure_tenant(tx: Transaction, name: str) -> None:
    """Have the tenant of a publisher, with an event when it is new."""
    if tx.tenants.ensure(name):
        tx.publish(Event(EventType.TENANT_CHANGED, tx.now, tenant=Tenant(name)))
