"""Weights and queue limits on their way from the registry's names to the core."""

from __future__ import annotations

import dataclasses

import pytest

from engine_svc.adapters.replica import Replica
from engine_svc.names import AdapterEntry, NameMap, NameMapUpdate, TenantEntry
from engine_svc.shares import NO_LIMIT, Shares, may_change_shares, quota_of, shares_of
from engine_svc.types import AdapterRef, TenantQuota
from loraplex.registry.v1 import registry_pb2 as pb


def entry(name: str, weight: float, digest: str = "") -> AdapterEntry:
    ref = AdapterRef(name, 2, digest or f"sha256:{name}", "default", weight=weight)
    return AdapterEntry(name, "default", False, True, ref)


def test_only_what_differs_from_the_default_is_listed() -> None:
    names = NameMap()
    names.apply(
        NameMapUpdate(
            1,
            adapters=(entry("a", 1.0), entry("b", 4.0)),
            tenants=(
                TenantEntry("default"),
                TenantEntry("acme", 3.0, 10, 0),
                TenantEntry("free", 0.5),
            ),
        )
    )
    assert shares_of(names) == Shares(
        tenant_weights={"acme": 3.0, "free": 0.5},
        adapter_weights={"sha256:b": 4.0},
        quotas={"acme": TenantQuota(10, NO_LIMIT)},
    )


def test_a_limit_that_the_registry_leaves_open_is_the_engines_own() -> None:
    names = NameMap()
    tenants = (TenantEntry("acme", 1.0, 10, 0), TenantEntry("free", 1.0, 0, 99), TenantEntry("x"))
    names.apply(NameMapUpdate(1, tenants=tenants))
    assert shares_of(names, quota_of(5, 50)).quotas == {
        "acme": TenantQuota(10, 50),
        "free": TenantQuota(5, 99),
    }


def test_older_versions_have_their_adapters_present_weight() -> None:
    names = NameMap()
    old = AdapterRef("a", 1, "sha256:old", weight=1.0)
    names.apply(NameMapUpdate(1, adapters=(entry("a", 2.0),), versions=(old,)))
    assert shares_of(names).adapter_weights == {"sha256:a": 2.0, "sha256:old": 2.0}


def test_one_content_under_two_names_has_the_larger_weight() -> None:
    names = NameMap()
    names.apply(NameMapUpdate(1, adapters=(entry("a", 2.0, "sha256:x"), entry("b", 5, "sha256:x"))))
    assert shares_of(names).adapter_weights == {"sha256:x": 5.0}


def test_a_snapshot_carries_tenants_and_a_deleted_adapter_has_no_weight() -> None:
    names, copy = NameMap(), NameMap()
    names.apply(NameMapUpdate(1, adapters=(entry("a", 2.0),), tenants=(TenantEntry("acme", 2.0),)))
    names.apply(NameMapUpdate(2, deleted=("a",)))
    copy.apply(names.snapshot())
    assert shares_of(copy) == shares_of(names) == Shares(tenant_weights={"acme": 2.0})


def test_events_that_cannot_change_shares_are_told_apart() -> None:
    assert not may_change_shares(NameMapUpdate(3))
    assert may_change_shares(NameMapUpdate(3, tenants=(TenantEntry("acme"),)))
    assert may_change_shares(NameMapUpdate(3, snapshot=True))


def test_a_tenants_event_becomes_its_weight_and_limits() -> None:
    replica = Replica("base")
    tenant = pb.Tenant(name="acme", weight=2.5, max_queued_requests=7, max_queued_tokens=9)
    event = pb.Event(revision=1, type=pb.EVENT_TYPE_TENANT_CHANGED, tenant=tenant)
    update = replica.apply(event)
    assert update == NameMapUpdate(1, tenants=(TenantEntry("acme", 2.5, 7, 9),))
    assert replica.snapshot().tenants == update.tenants


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 1e9, 1e-9])
def test_an_absurd_weight_that_the_registry_let_through_counts_as_one(weight: float) -> None:
    event = pb.Event(
        revision=1, type=pb.EVENT_TYPE_TENANT_CHANGED, tenant=pb.Tenant(name="acme", weight=weight)
    )
    update = Replica("base").apply(event)
    assert update is not None
    assert update.tenants == (TenantEntry("acme", 1.0),)


def test_shares_are_compared_by_what_they_say() -> None:
    shares = Shares({"a": 2.0}, {}, {})
    assert shares == dataclasses.replace(shares)
    assert shares != Shares()
