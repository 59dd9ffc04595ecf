"""Use cases of adapters that exist: read, update, roll back, alias, unregister, resolve."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from loraplex.status import FieldInvalid, NotFound
from registry_svc.database import Database
from registry_svc.domain import (
    Adapter,
    AdapterFilter,
    AdapterState,
    Alias,
    Caller,
    Event,
    EventType,
    Page,
    Version,
)
from registry_svc.names import check_base_alias, check_name, parse_reference
from registry_svc.repository.transaction import Transaction
from registry_svc.service.lookup import (
    own_active_adapter,
    own_adapter,
    resolve,
    version_not_found,
    visible_adapter,
)

MAX_DRAIN_S = 24 * 3600.0
#: An engine that has not been seen for this long is unreachable: nothing is known about it.
ENGINE_LEASE = dt.timedelta(seconds=30)
#: After this an engine is no longer mentioned.
ENGINE_FORGOTTEN = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Unregistered:
    """`revision` ends the adapter for engines that have applied it."""

    adapter: Adapter
    revision: int
    confirmed_by: tuple[str, ...]
    unreachable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Adapters:
    database: Database
    default_drain_s: float

    def get(self, caller: Caller, name: str) -> tuple[Adapter, Version, tuple[Alias, ...]]:
        check_name("name", name)

        def use_case(tx: Transaction) -> tuple[Adapter, Version, tuple[Alias, ...]]:
            adapter = visible_adapter(tx, caller, name)
            return adapter, current_version(tx, adapter), tuple(tx.adapters.aliases_of(name))

        return self.database.read(use_case)

    def list(self, caller: Caller, wanted: AdapterFilter, page: Page) -> list[Adapter]:
        if wanted.base_model:
            check_base_alias("base_model", wanted.base_model)
        if wanted.tenant:
            check_name("tenant", wanted.tenant)
        if wanted.name_prefix:
            check_name("name_prefix", wanted.name_prefix)

        def use_case(tx: Transaction) -> list[Adapter]:
            asked = wanted
            if asked.base_model and (known := tx.base_models.find(asked.base_model)):
                asked = dataclasses.replace(asked, base_model=known.name)
            return tx.adapters.page(caller, asked, page)

        return self.database.read(use_case)

    def versions(self, caller: Caller, name: str, below: int, size: int) -> Sequence[Version]:
        """Newest first."""
        check_name("name", name)

        def use_case(tx: Transaction) -> Sequence[Version]:
            visible_adapter(tx, caller, name)
            return tx.versions.page(name, below, size)

        return self.database.read(use_case)

    def update(self, caller: Caller, name: str, etag: str, changes: dict[str, object]) -> Adapter:
        """Set the given fields of an Adapter."""
        check_name("adapter.name", name)

        def use_case(tx: Transaction) -> Adapter:
            adapter = own_active_adapter(tx, caller, name, etag)
            if all(getattr(adapter, field) == value for field, value in changes.items()):
                return adapter
            changed = dataclasses.replace(adapter, **changes)  # type: ignore[arg-type]
            tx.ledger.audit(caller.tenant, "adapter.updated", name, sorted(changes), tx.now)
            return save_adapter(tx, changed)

        return self.database.write(use_case).value

    def roll_back(
        self, caller: Caller, name: str, version: int, etag: str
    ) -> tuple[Adapter, Version]:
        """Make `version` the current one; 0: the one before the current one."""
        check_name("name", name)
        if version < 0:
            raise FieldInvalid("version", version, "a version number, or 0 for the one before")

        def use_case(tx: Transaction) -> tuple[Adapter, Version]:
            adapter = own_active_adapter(tx, caller, name, etag)
            if version:
                target = tx.versions.get(name, version)
            else:
                target = tx.versions.before(name, adapter.current_version)
            if target is None or target.retired:
                shown = str(version or f"before {adapter.current_version}")
                raise version_not_found(adapter, shown)
            if target.version == adapter.current_version:
                return adapter, target
            changed = dataclasses.replace(adapter, current_version=target.version)
            detail = {"from": adapter.current_version, "to": target.version}
            tx.ledger.audit(caller.tenant, "adapter.rolled_back", name, detail, tx.now)
            return save_adapter(tx, changed), target

        return self.database.write(use_case).value

    def set_alias(self, caller: Caller, alias: str, adapter: str, version: int) -> Alias:
        """Point `alias` at an adapter, or remove it when `adapter` is empty."""
        check_name("alias", alias)
        if adapter:
            check_name("adapter", adapter)
        if version < 0 or (version and not adapter):
            raise FieldInvalid("version", version, "0, or a version of the adapter")

        def use_case(tx: Transaction) -> Alias:
            known = tx.adapters.get_alias(alias, lock=True)
            if known is not None:
                _check_alias_owner(tx, caller, known)
            elif not adapter:
                raise NotFound(f"alias {alias!r} does not exist", metadata={"alias": alias})
            wanted = Alias(alias, adapter, version)
            if wanted == known:
                return wanted
            if adapter:
                _point_alias(tx, caller, wanted)
            else:
                tx.adapters.remove_alias(alias)
                tx.names.release(alias)
            tx.publish(Event(EventType.ALIAS_CHANGED, tx.now, alias=wanted))
            detail = {"adapter": adapter, "version": version}
            tx.ledger.audit(caller.tenant, "alias.set", alias, detail, tx.now)
            return wanted

        return self.database.write(use_case).value

    def unregister(self, caller: Caller, name: str, drain_s: float, etag: str) -> Unregistered:
        """Refuse new requests from the returned revision on, delete after the drain. A second call
        shows who has confirmed since."""
        check_name("name", name)
        if not (math.isfinite(drain_s) and 0 <= drain_s <= MAX_DRAIN_S):
            raise FieldInvalid("drain_seconds", drain_s, f"0 to {MAX_DRAIN_S:g}")
        drain = dt.timedelta(seconds=drain_s or self.default_drain_s)

        def use_case(tx: Transaction) -> Adapter:
            adapter = own_adapter(tx, caller, name, etag)
            if adapter.state is AdapterState.DRAINING:
                return adapter
            tx.ledger.audit(caller.tenant, "adapter.unregistered", name, {}, tx.now)
            return save_adapter(
                tx,
                dataclasses.replace(
                    adapter, state=AdapterState.DRAINING, drain_deadline=tx.now + drain
                ),
            )

        adapter = self.database.write(use_case).value
        return self.database.read(lambda tx: _confirmations(tx, adapter))

    def finish_drains(self) -> int:
        """Delete the adapters whose drain is over. Returns: how many."""
        due = self.database.read(lambda tx: tx.adapters.drained(tx.now))
        return sum(self.database.write(partial(_delete, name=name)).value for name in due)

    def resolve(self, caller: Caller, reference: str) -> tuple[Adapter, Version, int]:
        """The adapter, version and the revision as of which this holds."""
        wanted = parse_reference(reference)

        def use_case(tx: Transaction) -> tuple[Adapter, Version, int]:
            return *resolve(tx, caller, wanted), tx.events.revision()

        return self.database.read(use_case)


def current_version(tx: Transaction, adapter: Adapter) -> Version:
    version = tx.versions.get(adapter.name, adapter.current_version)
    assert version is not None, "versions are never removed"
    return version


def save_adapter(tx: Transaction, adapter: Adapter) -> Adapter:
    """Write a changed adapter under its next etag and tell watchers."""
    changed = dataclasses.replace(adapter, generation=adapter.generation + 1, update_time=tx.now)
    tx.adapters.save(changed)
    deleted = changed.state is AdapterState.DELETED
    kind = EventType.ADAPTER_DELETED if deleted else EventType.ADAPTER_CHANGED
    tx.publish(Event(kind, tx.now, adapter=changed, version=current_version(tx, changed)))
    return changed


def _check_alias_owner(tx: Transaction, caller: Caller, alias: Alias) -> None:
    owner = tx.adapters.get(alias.adapter)
    if owner is not None and owner.state is AdapterState.DELETED:
        return
    own_adapter(tx, caller, alias.adapter)


def _point_alias(tx: Transaction, caller: Caller, alias: Alias) -> None:
    adapter = own_active_adapter(tx, caller, alias.adapter)
    if alias.version:
        version = tx.versions.get(alias.adapter, alias.version)
        if version is None or version.retired:
            raise version_not_found(adapter, str(alias.version))
    tx.names.claim(alias.alias, "alias", alias.alias)
    tx.adapters.put_alias(alias)


def _delete(tx: Transaction, name: str) -> bool:
    adapter = tx.adapters.get(name, lock=True)
    if adapter is None or adapter.state is not AdapterState.DRAINING:
        return False
    if adapter.drain_deadline is not None and adapter.drain_deadline > tx.now:
        return False
    for alias in tx.adapters.aliases_of(name):
        tx.adapters.remove_alias(alias.alias)
        tx.names.release(alias.alias)
        tx.publish(Event(EventType.ALIAS_CHANGED, tx.now, alias=Alias(alias.alias, "", 0)))
    tx.versions.retire_all(name)
    save_adapter(tx, dataclasses.replace(adapter, state=AdapterState.DELETED, drain_deadline=None))
    return True


def _confirmations(tx: Transaction, adapter: Adapter) -> Unregistered:
    revision = tx.events.last_of(adapter.name)
    engines = tx.ledger.engines(tx.now - ENGINE_FORGOTTEN)
    alive = tx.now - ENGINE_LEASE
    return Unregistered(
        adapter,
        revision,
        tuple(engine.id for engine in engines if engine.applied_revision >= revision),
        tuple(
            engine.id
            for engine in engines
            if engine.applied_revision < revision and engine.last_seen_time <= alive
        ),
    )
