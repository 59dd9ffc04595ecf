"""One transaction: the repositories of all tables, and the events that it will publish."""

from __future__ import annotations

import datetime as dt

from sqlalchemy.orm import Session

from registry_svc.domain import Event
from registry_svc.repository.adapters import AdapterRepository
from registry_svc.repository.base_models import BaseModelRepository
from registry_svc.repository.blobs import BlobRepository
from registry_svc.repository.events import EventRepository
from registry_svc.repository.ledger import LedgerRepository
from registry_svc.repository.names import NameRepository
from registry_svc.repository.tenants import TenantRepository
from registry_svc.repository.versions import VersionRepository


class Transaction:
    """What a use case works on. Locks are taken in one order, so that writes do not deadlock:
    adapter, upload, blobs by digest, revision."""

    def __init__(self, session: Session, now: dt.datetime) -> None:
        self.now = now
        self.names = NameRepository(session)
        self.base_models = BaseModelRepository(session)
        self.adapters = AdapterRepository(session)
        self.versions = VersionRepository(session)
        self.blobs = BlobRepository(session)
        self.tenants = TenantRepository(session)
        self.events = EventRepository(session)
        self.ledger = LedgerRepository(session)
        self._pending: list[Event] = []

    def publish(self, event: Event) -> None:
        """Tell watchers when this transaction commits."""
        self._pending.append(event)

    def assign_revisions(self) -> int:
        """Number the events and write them: the last statements before COMMIT.

        The counter's row stays locked until the commit is visible, so revisions become visible in
        their order. Returns: the last revision, 0 without events.
        """
        return self.events.append(self._pending) if self._pending else 0
