"""Which adapter a name means: the registry's names, replicated wherever requests are admitted.

`RegistryWatch` (engine_svc/adapters/watch.py) makes `NameMapUpdate`s, every frontend applies them
to a `NameMap` of its own, so resolving costs no call. Pure: no clock, no network.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine_svc.types import AdapterRef
from loraplex.status import NotFound
from loraplex.tenants import DEFAULT_TENANT

_MAX_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """One adapter as of a revision: `current` is what its bare name means."""

    name: str
    tenant: str
    public: bool
    active: bool
    current: AdapterRef


@dataclass(frozen=True, slots=True)
class AliasEntry:
    """A movable name. Empty `adapter`: the alias is gone; version 0 follows the current one."""

    alias: str
    adapter: str
    version: int = 0


@dataclass(frozen=True, slots=True)
class NameMapUpdate:
    """What one revision changed, or with `snapshot` everything as of a revision.

    `versions` are older versions that are still known; `deleted` are names of adapters.
    """

    revision: int
    adapters: tuple[AdapterEntry, ...] = ()
    versions: tuple[AdapterRef, ...] = ()
    deleted: tuple[str, ...] = ()
    aliases: tuple[AliasEntry, ...] = ()
    snapshot: bool = False

    @property
    def ends_adapter(self) -> bool:
        """Whether some name stops answering by this update."""
        return bool(self.deleted) or any(not entry.active for entry in self.adapters)


class NameMap:
    """Names of one base model's adapters, as of `revision`."""

    def __init__(self) -> None:
        self.revision = 0
        self._adapters: dict[str, AdapterEntry] = {}
        #: (name, version) of every version seen, the current ones included
        self._versions: dict[str, dict[int, AdapterRef]] = {}
        self._aliases: dict[str, AliasEntry] = {}

    def apply(self, update: NameMapUpdate) -> bool:
        """Take an update over; one that is not newer than `revision` changes nothing.

        A snapshot always replaces everything. Returns: whether anything was applied.
        """
        if update.snapshot:
            self._adapters, self._versions, self._aliases = {}, {}, {}
        elif update.revision <= self.revision:
            return False
        self.revision = update.revision
        for ref in update.versions:
            self._versions.setdefault(ref.name, {})[ref.version] = ref
        for entry in update.adapters:
            self._adapters[entry.name] = entry
            self._versions.setdefault(entry.name, {})[entry.current.version] = entry.current
        for name in update.deleted:
            self._adapters.pop(name, None)
            self._versions.pop(name, None)
        for alias in update.aliases:
            if alias.adapter:
                self._aliases[alias.alias] = alias
            else:
                self._aliases.pop(alias.alias, None)
        return True

    def snapshot(self) -> NameMapUpdate:
        """All of it, for a replica that starts now."""
        return NameMapUpdate(
            revision=self.revision,
            adapters=tuple(self._adapters.values()),
            versions=tuple(ref for refs in self._versions.values() for ref in refs.values()),
            aliases=tuple(self._aliases.values()),
            snapshot=True,
        )

    def resolve(self, reference: str, tenant: str) -> AdapterRef:
        """The version that `name`, an alias, `name@3` or `name@sha256:…` means to `tenant`.

        Raises: NotFound MODEL_NOT_FOUND or VERSION_NOT_FOUND. An adapter that the tenant may not
        use does not exist for it; suggestions are names that it may use.
        """
        name, _, selector = reference.partition("@")
        alias = self._aliases.get(name)
        entry = self._adapters.get(alias.adapter if alias is not None else name)
        if entry is None or not entry.active or not _may_use(entry, tenant):
            raise self._not_found(reference, name, tenant)
        if alias is not None and alias.version and not selector:
            selector = str(alias.version)
        if not selector:
            return entry.current
        for ref in self._versions[entry.name].values():
            if selector in (str(ref.version), ref.digest):
                return _as_of(ref, entry)
        raise NotFound(
            f"adapter {entry.name!r} has no version {selector!r}; its current one is "
            f"{entry.current.version}",
            reason="VERSION_NOT_FOUND",
            metadata={"model": reference, "current_version": str(entry.current.version)},
        )

    def list(self, tenant: str) -> tuple[AdapterRef, ...]:
        """The current version of every adapter that `tenant` may use, by name."""
        return tuple(entry.current for entry in self._usable(tenant))

    def _usable(self, tenant: str) -> Iterable[AdapterEntry]:
        return (
            entry
            for _, entry in sorted(self._adapters.items())
            if entry.active and _may_use(entry, tenant)
        )

    def _not_found(self, reference: str, name: str, tenant: str) -> NotFound:
        usable = [entry.name for entry in self._usable(tenant)]
        known = set(usable)
        usable += [item.alias for item in self._aliases.values() if item.adapter in known]
        near = difflib.get_close_matches(name, usable, n=_MAX_SUGGESTIONS, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        return NotFound(
            f"no model {reference!r} here{hint}",
            reason="MODEL_NOT_FOUND",
            metadata={"model": reference, "suggestions": ",".join(near)},
        )


def _may_use(entry: AdapterEntry, tenant: str) -> bool:
    return entry.public or (entry.tenant or DEFAULT_TENANT) == (tenant or DEFAULT_TENANT)


def token_pairs(tokens: Mapping[str, str] | None) -> tuple[tuple[str, str], ...] | None:
    """Special tokens as an AdapterRef holds them."""
    return None if tokens is None else tuple(sorted(tokens.items()))


def _as_of(ref: AdapterRef, entry: AdapterEntry) -> AdapterRef:
    """An older version with the adapter's present owner, visibility and weight."""
    if ref is entry.current or ref.version == entry.current.version:
        return entry.current
    return AdapterRef(
        name=ref.name,
        version=ref.version,
        digest=ref.digest,
        tenant=entry.current.tenant,
        public=entry.public,
        max_rank=ref.max_rank,
        weight=entry.current.weight,
        chat_template=ref.chat_template,
        template_tokens=ref.template_tokens,
        eos_token_ids=ref.eos_token_ids,
    )
