"""Events and the counter that numbers them."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Sequence
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from registry_svc.domain import (
    Adapter,
    AdapterState,
    Alias,
    BaseModel,
    Event,
    EventType,
    Tenant,
    Version,
)
from registry_svc.repository.versions import VersionRepository
from registry_svc.tables import EventRow, RevisionRow


class EventRepository:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._versions = VersionRepository(session)

    def revision(self) -> int:
        """The last revision that this transaction can see."""
        return self._session.scalars(select(RevisionRow.value)).one()

    def append(self, events: Sequence[Event]) -> int:
        """Take the next revisions for `events`, in order. Returns: the last one."""
        self._session.flush()
        last = self._session.scalars(
            update(RevisionRow)
            .values(value=RevisionRow.value + len(events))
            .returning(RevisionRow.value)
            .execution_options(synchronize_session=False)
        ).one()
        first = last - len(events) + 1
        rows = [_row(event, first + index) for index, event in enumerate(events)]
        self._session.execute(insert(EventRow), rows)
        return last

    def after(self, revision: int, limit: int) -> list[Event]:
        """Events with a larger revision, oldest first."""
        rows = self._session.scalars(
            select(EventRow)
            .where(EventRow.revision > revision)
            .order_by(EventRow.revision)
            .limit(limit)
        ).all()
        keys = [(row.adapter, row.version) for row in rows if row.adapter and row.version]
        versions = self._versions.get_many(keys)
        return [_event(row, versions) for row in rows]

    def last_of(self, adapter: str) -> int:
        """The revision of the last event of an adapter, 0 without one."""
        query = select(EventRow.revision).where(EventRow.adapter == adapter)
        found = self._session.scalars(query.order_by(EventRow.revision.desc()).limit(1))
        return found.one_or_none() or 0


def _row(event: Event, revision: int) -> dict[str, Any]:
    subject = event.adapter or event.base_model or event.alias or event.tenant
    assert subject is not None, "an event is about something"
    return {
        "revision": revision,
        "type": event.type.value,
        "adapter": event.adapter.name if event.adapter else None,
        "version": event.version.version if event.version else None,
        "payload": _encode(subject),
        "time": event.time,
    }


def _encode(subject: Adapter | BaseModel | Alias | Tenant) -> dict[str, Any]:
    payload = dataclasses.asdict(subject)
    for key, value in payload.items():
        if isinstance(value, dt.datetime):
            payload[key] = value.isoformat()
        elif isinstance(value, AdapterState):
            payload[key] = value.value
    return payload


def _event(row: EventRow, versions: dict[tuple[str, int], Version]) -> Event:
    kind, payload = EventType(row.type), dict(row.payload)
    event = Event(type=kind, time=row.time, revision=row.revision)
    for key in ("create_time", "update_time", "drain_deadline"):
        if payload.get(key):
            payload[key] = dt.datetime.fromisoformat(payload[key])
    if kind is EventType.BASE_MODEL_CHANGED:
        payload["aliases"] = tuple(payload["aliases"])
        payload["eos_token_ids"] = tuple(payload["eos_token_ids"])
        return dataclasses.replace(event, base_model=BaseModel(**payload))
    if kind is EventType.ALIAS_CHANGED:
        return dataclasses.replace(event, alias=Alias(**payload))
    if kind is EventType.TENANT_CHANGED:
        return dataclasses.replace(event, tenant=Tenant(**payload))
    payload["state"] = AdapterState(payload["state"])
    version = versions.get((row.adapter or "", row.version or 0))
    return dataclasses.replace(event, adapter=Adapter(**payload), version=version)
