"""The queue's size: requests that have not had their first chunk, in all and by tenant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine_svc.core.flow import Flow
from engine_svc.types import TenantQuota


@dataclass(slots=True)
class _Size:
    requests: int = 0
    tokens: int = 0


class Queue:
    """Counts requests and their prompt tokens; empty tenants are forgotten."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._tenants: dict[str, _Size] = {}
        self._quotas: Mapping[str, TenantQuota] = {}

    def set_quotas(self, quotas: Mapping[str, TenantQuota]) -> None:
        """Raises: ValueError for a quota below zero."""
        for tenant, quota in quotas.items():
            for name in ("max_queued_requests", "max_queued_tokens"):
                if getattr(quota, name) < 0:
                    raise ValueError(
                        f"{name} of tenant {tenant} is {getattr(quota, name)}; must be at least 0"
                    )
        self._quotas = dict(quotas)

    def quota(self, tenant: str) -> TenantQuota | None:
        return self._quotas.get(tenant)

    def size_of(self, tenant: str) -> tuple[int, int]:
        """Requests and prompt tokens of one tenant."""
        size = self._tenants.get(tenant)
        return (0, 0) if size is None else (size.requests, size.tokens)

    def join(self, flow: Flow, tokens: int) -> None:
        self._count(flow, 1, tokens)

    def leave(self, flow: Flow, tokens: int) -> None:
        self._count(flow, -1, -tokens)

    def _count(self, flow: Flow, requests: int, tokens: int) -> None:
        self.num_requests += requests
        self.num_tokens += tokens
        flow.num_queued += requests
        flow.queued_tokens += tokens
        size = self._tenants.setdefault(flow.key.tenant, _Size())
        size.requests += requests
        size.tokens += tokens
        if not size.requests:
            del self._tenants[flow.key.tenant]

    def check_integrity(self, queued: list[tuple[str, int]]) -> None:
        """`queued`: tenant and prompt tokens of every request that waits for its first chunk."""
        assert self.num_requests == len(queued)
        assert self.num_tokens == sum(tokens for _, tokens in queued)
        tenants = {tenant for tenant, _ in queued}
        assert self._tenants.keys() == tenants, "a tenant's part of the queue is forgotten"
        for tenant in tenants:
            mine = [tokens for name, tokens in queued if name == tenant]
            assert self.size_of(tenant) == (len(mine), sum(mine))
