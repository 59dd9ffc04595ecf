"""Adapters and the aliases that point at them."""

from __future__ import annotations

import datetime as dt

from sqlalchemy import Select, delete, func, or_, select
from sqlalchemy.orm import Session

from registry_svc.domain import Adapter, AdapterFilter, AdapterState, Alias, Caller, Page
from registry_svc.tables import AdapterRow, AliasRow

_FIELDS = (
    "name", "tenant", "base_model", "current_version", "last_version", "public", "labels",
    "description", "weight", "create_time", "update_time", "drain_deadline", "generation",
)  # fmt: skip


class AdapterRepository:
    def __init__(self, session: Session) -> None:
        self._session = session

    def get(self, name: str, *, lock: bool = False) -> Adapter | None:
        row = self._row(name, lock)
        return _domain(row) if row else None

    def add(self, adapter: Adapter) -> None:
        row = AdapterRow(state=adapter.state.value)
        _fill(row, adapter)
        self._session.add(row)
        self._session.flush()

    def save(self, adapter: Adapter) -> None:
        row = self._row(adapter.name, lock=True)
        assert row is not None, "save follows a locking get"
        _fill(row, adapter)
        self._session.flush()

    def page(self, caller: Caller, wanted: AdapterFilter, page: Page) -> list[Adapter]:
        query = _visible(caller).where(AdapterRow.name > page.after)
        if wanted.base_model:
            query = query.where(AdapterRow.base_model == wanted.base_model)
        if wanted.tenant:
            query = query.where(AdapterRow.tenant == wanted.tenant)
        if wanted.name_prefix:
            query = query.where(AdapterRow.name.startswith(wanted.name_prefix, autoescape=True))
        if not wanted.include_inactive:
            query = query.where(AdapterRow.state == AdapterState.ACTIVE.value)
        rows = self._session.scalars(query.order_by(AdapterRow.name).limit(page.size))
        return [_domain(row) for row in rows]

    def similar_names(self, caller: Caller, start: str, limit: int) -> list[str]:
        """Active names that the caller may see and that begin with `start`."""
        query = _visible(caller).where(
            AdapterRow.name.startswith(start, autoescape=True),
            AdapterRow.state == AdapterState.ACTIVE.value,
        )
        return [row.name for row in self._session.scalars(query.limit(limit))]

    def drained(self, now: dt.datetime) -> list[str]:
        """Names whose drain deadline has passed."""
        return list(
            self._session.scalars(
                select(AdapterRow.name)
                .where(
                    AdapterRow.state == AdapterState.DRAINING.value,
                    AdapterRow.drain_deadline <= now,
                )
                .order_by(AdapterRow.name)
            )
        )

    def count_by_state(self) -> dict[str, int]:
        found = self._session.execute(
            select(AdapterRow.state, func.count()).group_by(AdapterRow.state)
        )
        return {state: count for state, count in found}

    def get_alias(self, alias: str, *, lock: bool = False) -> Alias | None:
        query = select(AliasRow).where(AliasRow.alias == alias)
        row = self._session.scalars(query.with_for_update() if lock else query).one_or_none()
        return Alias(row.alias, row.adapter, row.version) if row else None

    def aliases_of(self, adapter: str) -> list[Alias]:
        rows = self._session.scalars(
            select(AliasRow).where(AliasRow.adapter == adapter).order_by(AliasRow.alias)
        )
        return [Alias(row.alias, row.adapter, row.version) for row in rows]

    def put_alias(self, alias: Alias) -> None:
        self._session.merge(
            AliasRow(alias=alias.alias, adapter=alias.adapter, version=alias.version)
        )
        self._session.flush()

    def remove_alias(self, alias: str) -> None:
        self._session.execute(delete(AliasRow).where(AliasRow.alias == alias))

    def _row(self, name: str, lock: bool) -> AdapterRow | None:
        query = select(AdapterRow).where(AdapterRow.name == name)
        return self._session.scalars(query.with_for_update() if lock else query).one_or_none()


def _visible(caller: Caller) -> Select[AdapterRow]:
    return select(AdapterRow).where(or_(AdapterRow.tenant == caller.tenant, AdapterRow.public))


def _fill(row: AdapterRow, adapter: Adapter) -> None:
    row.state = adapter.state.value
    for name in _FIELDS:
        setattr(row, name, getattr(adapter, name))


def _domain(row: AdapterRow) -> Adapter:
    return Adapter(state=AdapterState(row.state), **{name: getattr(row, name) for name in _FIELDS})
