"""The last transaction of a publish: from checked content to a visible version."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from loraplex.adapter_format import Manifest
from loraplex.status import AdapterRefused, AlreadyExists, NotFound
from registry_svc.domain import (
    Adapter,
    AdapterState,
    BlobState,
    Caller,
    Event,
    EventType,
    StoredFile,
    Version,
)
from registry_svc.repository.transaction import Transaction
from registry_svc.service.adapters import save_adapter
from registry_svc.service.lookup import not_active
from registry_svc.service.tenants import ensure_tenant
from registry_svc.service.uploads import live_upload


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """Content that passed the check, and what the caller said of it."""

    name: str
    base_model: str
    base_model_confirmed: bool
    upload_id: str
    manifest: Manifest
    max_rank: int
    weights_bytes: int
    parameter_count: int
    public: bool | None
    labels: dict[str, str]
    description: str
    not_stored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Published:
    adapter: Adapter
    version: Version
    created: bool
    notice: str = ""
    not_stored: tuple[str, ...] = ()


def check_publishable(
    tx: Transaction, caller: Caller, name: str, *, lock: bool = False
) -> Adapter | None:
    """The adapter of that name, if any, when the caller may publish under it.

    Raises: AlreadyExists NAME_TAKEN; FailedPrecondition VERSION_NOT_ACTIVE while it drains.
    """
    tx.names.require_free(name, "adapter", name)
    adapter = tx.adapters.get(name, lock=lock)
    if adapter is None:
        return None
    if adapter.tenant != caller.tenant:
        raise AlreadyExists(f"name {name!r} is taken; choose another", metadata={"name": name})
    if adapter.state is AdapterState.DRAINING:
        raise not_active(adapter)
    return adapter


def commit(tx: Transaction, caller: Caller, plan: CommitPlan) -> Published:
    """Publish, once every blob is known to stay."""
    tx.names.claim(plan.name, "adapter", plan.name)
    ensure_tenant(tx, caller.tenant)
    adapter = check_publishable(tx, caller, plan.name, lock=True)
    _hold_blobs(tx, caller, plan)
    tx.blobs.remove_uploads([plan.upload_id])
    if adapter is None:
        return _first_version(tx, caller, plan)
    known = tx.versions.by_digest(plan.name, plan.manifest.digest)
    if adapter.state is AdapterState.DELETED:
        return _revive(tx, caller, plan, adapter, known)
    if known is not None:
        return Published(adapter, known, False, _notice(adapter, known), plan.not_stored)
    if adapter.base_model != plan.base_model:
        raise AdapterRefused(
            f"adapter {plan.name!r} is one of base model {adapter.base_model!r},"
            f" not {plan.base_model!r}; publish under another name",
            reason="BASE_MODEL_MISMATCH",
            metadata={"declared": plan.base_model, "base_model": adapter.base_model},
        )
    return _next_version(tx, caller, plan, adapter)


def _first_version(tx: Transaction, caller: Caller, plan: CommitPlan) -> Published:
    adapter = Adapter(
        name=plan.name,
        tenant=caller.tenant,
        base_model=plan.base_model,
        state=AdapterState.ACTIVE,
        current_version=1,
        last_version=1,
        public=bool(plan.public),
        labels=plan.labels,
        description=plan.description,
        weight=1.0,
        create_time=tx.now,
        update_time=tx.now,
    )
    tx.adapters.add(adapter)
    version = _add_version(tx, caller, plan, 1)
    tx.publish(Event(EventType.ADAPTER_CHANGED, tx.now, adapter=adapter, version=version))
    return Published(adapter, version, True, "", plan.not_stored)


def _next_version(tx: Transaction, caller: Caller, plan: CommitPlan, adapter: Adapter) -> Published:
    number = adapter.last_version + 1
    version = _add_version(tx, caller, plan, number)
    changed = dataclasses.replace(
        _described(adapter, plan),
        current_version=number,
        last_version=number,
        base_model=plan.base_model,
        state=AdapterState.ACTIVE,
    )
    return Published(save_adapter(tx, changed), version, True, "", plan.not_stored)


def _revive(
    tx: Transaction, caller: Caller, plan: CommitPlan, adapter: Adapter, known: Version | None
) -> Published:
    """Publishing under a deleted name makes it active again, with this content only."""
    if known is None:
        return _next_version(tx, caller, plan, adapter)
    tx.versions.revive(plan.name, known.version)
    changed = dataclasses.replace(
        _described(adapter, plan),
        current_version=known.version,
        base_model=plan.base_model,
        state=AdapterState.ACTIVE,
    )
    notice = f"{plan.name} was unregistered; it is active again with version {known.version}"
    tx.ledger.audit(caller.tenant, "adapter.revived", plan.name, known.version, tx.now)
    saved = save_adapter(tx, changed)
    version = dataclasses.replace(known, retired=False)
    return Published(saved, version, False, notice, plan.not_stored)


def _add_version(tx: Transaction, caller: Caller, plan: CommitPlan, number: int) -> Version:
    version = Version(
        adapter=plan.name,
        version=number,
        digest=plan.manifest.digest,
        canonical_json=plan.manifest.canonical_json,
        files=tuple(
            StoredFile(file.name, file.size_bytes, file.sha256) for file in plan.manifest.files
        ),
        base_model=plan.base_model,
        max_rank=plan.max_rank,
        weights_bytes=plan.weights_bytes,
        parameter_count=plan.parameter_count,
        create_time=tx.now,
    )
    tx.versions.add(version)
    detail = {
        "version": number,
        "digest": version.digest,
        "base_model_confirmed": plan.base_model_confirmed,
    }
    tx.ledger.audit(caller.tenant, "adapter.published", plan.name, detail, tx.now)
    return version


def _hold_blobs(tx: Transaction, caller: Caller, plan: CommitPlan) -> None:
    """Lock the blobs so that they stay until this version refers to them.

    Raises: NotFound UPLOAD_NOT_FOUND: the upload expired and blobs were collected meanwhile.
    """
    live_upload(tx, caller, plan.upload_id, lock=True)
    for sha256 in sorted({file.sha256 for file in plan.manifest.files}):
        if tx.blobs.lock_state(sha256) is not BlobState.STORED:
            raise NotFound(
                f"upload {plan.upload_id} expired while it was checked; publish again",
                reason="UPLOAD_NOT_FOUND",
                metadata={"upload_id": plan.upload_id},
            )


def _described(adapter: Adapter, plan: CommitPlan) -> Adapter:
    """What the caller left empty stays as it was."""
    return dataclasses.replace(
        adapter,
        public=adapter.public if plan.public is None else plan.public,
        labels=plan.labels or adapter.labels,
        description=plan.description or adapter.description,
    )


def _notice(adapter: Adapter, known: Version) -> str:
    if known.version == adapter.current_version:
        return f"this content is version {known.version}, the current one; nothing changed"
    return (
        f"this content is version {known.version}; current stays {adapter.current_version};"
        f" `registryctl rollback {adapter.name} --version {known.version}` would make it current"
    )
