"""The registry's events, applied in order to the names and manifests of one base model."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict

from engine_svc.names import (
    AdapterEntry,
    AliasEntry,
    NameMap,
    NameMapUpdate,
    TenantEntry,
    token_pairs,
)
from engine_svc.types import AdapterRef
from loraplex.adapter_format import parse_manifest
from loraplex.registry.v1 import registry_pb2
from loraplex.shares import is_weight
from loraplex.status import AdapterRefused

log = logging.getLogger(__name__)

#: manifests kept, of old versions too; a load of one that was pushed out asks the registry
MAX_MANIFESTS = 100_000


class Replica:
    """`apply` belongs to one thread; `snapshot` and `manifest_text` may be called from any."""

    def __init__(self, base_model: str) -> None:
        self.base_model = base_model
        self._lock = threading.Lock()
        self._names = NameMap()
        self._manifests: OrderedDict[str, bytes] = OrderedDict()

    @property
    def revision(self) -> int:
        return self._names.revision

    def apply(self, event: registry_pb2.Event) -> NameMapUpdate | None:
        """What the event changes; None when its revision was applied before."""
        if event.revision <= self.revision:
            return None
        update = self._update_of(event)
        with self._lock:
            self._names.apply(update)
        return update

    def advance(self, revision: int) -> None:
        """Nothing up to `revision` is missing."""
        with self._lock:
            self._names.apply(NameMapUpdate(revision))

    def snapshot(self) -> NameMapUpdate:
        with self._lock:
            return self._names.snapshot()

    def manifest_text(self, digest: str) -> bytes | None:
        with self._lock:
            return self._manifests.get(digest)

    def _update_of(self, event: registry_pb2.Event) -> NameMapUpdate:
        if event.type == registry_pb2.EVENT_TYPE_ALIAS_CHANGED:
            alias = AliasEntry(event.alias.alias, event.alias.adapter, event.alias.version)
            return NameMapUpdate(event.revision, aliases=(alias,))
        if event.type == registry_pb2.EVENT_TYPE_TENANT_CHANGED:
            return NameMapUpdate(event.revision, tenants=(_tenant(event.tenant),))
        if event.adapter.base_model == self.base_model:
            if event.type == registry_pb2.EVENT_TYPE_ADAPTER_DELETED:
                return NameMapUpdate(event.revision, deleted=(event.adapter.name,))
            if event.type == registry_pb2.EVENT_TYPE_ADAPTER_CHANGED:
                return self._changed(event)
        return NameMapUpdate(event.revision)

    def _changed(self, event: registry_pb2.Event) -> NameMapUpdate:
        """A version whose manifest this build cannot read is not served under any name."""
        adapter, version = event.adapter, event.version
        text = version.manifest.canonical_json
        try:
            manifest = parse_manifest(text)
            if manifest.digest != version.manifest.digest:
                raise AdapterRefused(f"manifest has digest {manifest.digest}")
        except AdapterRefused as error:
            log.error(
                "adapter.manifest_unreadable",
                extra={"adapter": adapter.name, "version": version.version, "cause": str(error)},
            )
            return NameMapUpdate(event.revision, deleted=(adapter.name,))
        with self._lock:
            self._manifests[manifest.digest] = text
            self._manifests.move_to_end(manifest.digest)
            while len(self._manifests) > MAX_MANIFESTS:
                self._manifests.popitem(last=False)
        public = adapter.visibility == registry_pb2.VISIBILITY_PUBLIC
        current = AdapterRef(
            name=adapter.name,
            version=version.version,
            digest=manifest.digest,
            tenant=adapter.tenant,
            public=public,
            max_rank=version.max_rank,
            weight=_weight(adapter.weight, adapter.name),
            chat_template=manifest.chat_template,
            template_tokens=token_pairs(manifest.template_tokens),
            eos_token_ids=manifest.eos_token_ids,
        )
        active = adapter.state == registry_pb2.ADAPTER_STATE_ACTIVE
        entry = AdapterEntry(adapter.name, adapter.tenant, public, active, current)
        return NameMapUpdate(event.revision, adapters=(entry,))


def _tenant(tenant: registry_pb2.Tenant) -> TenantEntry:
    return TenantEntry(
        tenant.name,
        _weight(tenant.weight, tenant.name),
        max(0, tenant.max_queued_requests),
        max(0, tenant.max_queued_tokens),
    )


def _weight(weight: float, name: str) -> float:
    """0 is read as 1. The registry refuses absurd weights; one that comes all the same counts as 1,
    or a single row would end the engine's sharing."""
    if weight == 0:
        return 1.0
    if not is_weight(weight):
        log.error("weight.refused", extra={"name_of": name, "weight": weight})
        return 1.0
    return weight
