"""Who gets how much: weights and queue limits as the registry has them, for the core.

The loader makes them from its names, the core applies them between two steps. Only what differs
from the default is listed, so that 10,000 adapters of equal weight cost nothing to send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_svc.names import NameMap, NameMapUpdate
from engine_svc.types import TenantQuota

DEFAULT_WEIGHT = 1.0
#: more than any queue holds: what the registry and the settings call 0, no limit
NO_LIMIT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Shares:
    """A name that is absent has weight 1, or no limit of its own."""

    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    #: by digest; of a content under two names the larger weight counts
    adapter_weights: Mapping[str, float] = field(default_factory=dict)
    quotas: Mapping[str, TenantQuota] = field(default_factory=dict)


def quota_of(max_queued_requests: int, max_queued_tokens: int) -> TenantQuota:
    """0 is no limit."""
    return TenantQuota(max_queued_requests or NO_LIMIT, max_queued_tokens or NO_LIMIT)


def shares_of(names: NameMap, default: TenantQuota | None = None) -> Shares:
    """All weights and limits of a name map, in one pass over it; `default` holds where a tenant
    has one limit of its own and not the other."""
    default = default or quota_of(0, 0)
    heaviest: dict[str, float] = {}
    for digest, weight in names.weights():
        heaviest[digest] = max(weight, heaviest.get(digest, 0.0))
    return Shares(
        tenant_weights={
            tenant.name: tenant.weight
            for tenant in names.tenants
            if tenant.weight != DEFAULT_WEIGHT
        },
        adapter_weights={d: weight for d, weight in heaviest.items() if weight != DEFAULT_WEIGHT},
        quotas={
            tenant.name: TenantQuota(
                tenant.max_queued_requests or default.max_queued_requests,
                tenant.max_queued_tokens or default.max_queued_tokens,
            )
            for tenant in names.tenants
            if tenant.max_queued_requests or tenant.max_queued_tokens
        },
    )


def may_change_shares(update: NameMapUpdate) -> bool:
    return bool(update.snapshot or update.tenants or update.adapters or update.deleted)
