"""Finding an adapter or a version for a caller: what it may not see does not exist."""

from __future__ import annotations

import difflib

from loraplex.status import (
    Aborted,
    FailedPrecondition,
    LoraplexError,
    NotFound,
    PermissionDenied,
)
from registry_svc.domain import Adapter, AdapterState, BaseModel, Caller, Version
from registry_svc.names import Reference
from registry_svc.repository.transaction import Transaction


def visible_adapter(tx: Transaction, caller: Caller, name: str) -> Adapter:
    """Raises: NotFound ADAPTER_NOT_FOUND, also when it is deleted or another tenant's."""
    found = tx.adapters.get(name)
    if found is None or found.state is AdapterState.DELETED or not found.visible_to(caller):
        raise adapter_not_found(tx, caller, name)
    return found


def own_active_adapter(tx: Transaction, caller: Caller, name: str, etag: str = "") -> Adapter:
    """The adapter, locked, for a change by its tenant.

    Raises: NotFound; PermissionDenied TENANT_FORBIDDEN; FailedPrecondition VERSION_NOT_ACTIVE;
    Aborted ETAG_MISMATCH.
    """
    found = own_adapter(tx, caller, name, etag)
    if found.state is not AdapterState.ACTIVE:
        raise not_active(found)
    return found


def own_adapter(tx: Transaction, caller: Caller, name: str, etag: str = "") -> Adapter:
    """Like `own_active_adapter`, but it may be draining."""
    found = tx.adapters.get(name, lock=True)
    if found is None or found.state is AdapterState.DELETED or not found.visible_to(caller):
        raise adapter_not_found(tx, caller, name)
    if found.tenant != caller.tenant:
        raise PermissionDenied(
            f"adapter {name!r} is public but belongs to another tenant; only that one changes it",
            metadata={"adapter": name},
        )
    check_etag(etag, found.etag, f"adapter {name!r}")
    return found


def resolve(tx: Transaction, caller: Caller, wanted: Reference) -> tuple[Adapter, Version]:
    """The adapter and version that a reference means to this caller.

    Raises: NotFound ADAPTER_NOT_FOUND or VERSION_NOT_FOUND; FailedPrecondition VERSION_NOT_ACTIVE.
    """
    alias = tx.adapters.get_alias(wanted.name)
    name = alias.adapter if alias else wanted.name
    found = tx.adapters.get(name)
    if found is None or found.state is AdapterState.DELETED or not found.visible_to(caller):
        raise adapter_not_found(tx, caller, wanted.name)
    if found.state is not AdapterState.ACTIVE:
        raise not_active(found)
    if wanted.digest:
        version = tx.versions.by_digest(name, wanted.digest)
    else:
        number = wanted.version or (alias.version if alias else 0) or found.current_version
        version = tx.versions.get(name, number)
    if version is None or version.retired:
        shown = wanted.digest or str(wanted.version)
        raise version_not_found(found, shown)
    return found, version


def known_base_model(tx: Transaction, name: str) -> BaseModel:
    """Raises: NotFound BASE_MODEL_NOT_FOUND."""
    found = tx.base_models.find(name)
    if found is None:
        raise NotFound(
            f"base model {name!r} is not registered; see `registryctl base-model add`",
            reason="BASE_MODEL_NOT_FOUND",
            metadata={"base_model": name},
        )
    return found


def adapter_not_found(tx: Transaction, caller: Caller, name: str) -> NotFound:
    """With near names among those that the caller may use."""
    near = tx.adapters.similar_names(caller, name[:2], 200)
    close = difflib.get_close_matches(name, near, n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return NotFound(
        f"adapter {name!r} does not exist{hint}",
        metadata={"adapter": name, "suggestions": ",".join(close)},
    )


def version_not_found(adapter: Adapter, version: str) -> NotFound:
    return NotFound(
        f"adapter {adapter.name!r} has no version {version};"
        f" see `registryctl versions {adapter.name}`",
        reason="VERSION_NOT_FOUND",
        metadata={"adapter": adapter.name, "version": version},
    )


def not_active(adapter: Adapter) -> FailedPrecondition:
    metadata = {"adapter": adapter.name, "state": adapter.state.value}
    until = ""
    if adapter.drain_deadline is not None:
        metadata["drain_deadline"] = adapter.drain_deadline.isoformat(timespec="seconds")
        until = f" and drains until {metadata['drain_deadline']}; publish again after that"
    return FailedPrecondition(
        f"adapter {adapter.name!r} is {adapter.state.value}: it was unregistered{until}",
        reason="VERSION_NOT_ACTIVE",
        metadata=metadata,
    )


def check_etag(given: str, current: str, what: str) -> None:
    """Raises: Aborted ETAG_MISMATCH; an empty etag is not checked."""
    if given and given != current:
        error: LoraplexError = Aborted(
            f"{what} changed since it was read (etag {current!r}, not {given!r}); read it again",
            metadata={"etag": current, "given": given},
        )
        raise error
