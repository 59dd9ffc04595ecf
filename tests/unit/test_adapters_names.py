"""Resolving names: versions, aliases, who may see what, and updates in order."""

from __future__ import annotations

import pickle

import pytest

from engine_svc.names import AdapterEntry, AliasEntry, NameMap, NameMapUpdate
from engine_svc.types import AdapterRef
from loraplex.status import NameInvalid, NotFound


def ref(name="sql-lora", version=1, tenant="default", **fields):
    digest = f"sha256:{name}-{version}".ljust(71, "0")
    return AdapterRef(name, version, digest, tenant=tenant, **fields)


def entry(name="sql-lora", version=1, tenant="default", public=False, active=True, **fields):
    current = ref(name, version, tenant, public=public, **fields)
    return AdapterEntry(name, tenant, public, active, current)


def filled() -> NameMap:
    names = NameMap()
    names.apply(
        NameMapUpdate(
            7,
            adapters=(
                entry(version=3, weight=2.0),
                entry("shared", public=True, tenant="a"),
                entry("secret", tenant="a"),
            ),
            versions=(ref(version=1), ref(version=2)),
            aliases=(
                AliasEntry("sql", "sql-lora"),
                AliasEntry("sql-old", "sql-lora", 2),
                AliasEntry("hidden", "secret"),
            ),
            snapshot=True,
        )
    )
    return names


@pytest.mark.parametrize(
    ("reference", "version"),
    [
        ("sql-lora", 3),
        ("sql", 3),
        ("sql-old", 2),
        ("sql-lora@1", 1),
        ("sql@2", 2),
        (f"sql-lora@{ref(version=2).digest}", 2),
    ],
)
def test_every_form_of_a_reference_resolves(reference, version):
    found = filled().resolve(reference, "default")
    assert (found.name, found.version) == ("sql-lora", version)
    assert found.weight == 2.0


def test_private_adapter_exists_only_for_its_tenant():
    names = filled()
    assert names.resolve("secret", "a").name == "secret"
    for reference in ("secret", "hidden", "secret@1"):
        with pytest.raises(NotFound) as raised:
            names.resolve(reference, "default")
        assert raised.value.reason == "MODEL_NOT_FOUND"
        assert "secret" not in raised.value.metadata["suggestions"]
    assert [item.name for item in names.list("default")] == ["shared", "sql-lora"]
    assert [item.name for item in names.list("a")] == ["secret", "shared"]


def test_unseen_name_gets_suggestions_among_usable_names_only():
    with pytest.raises(NotFound) as raised:
        filled().resolve("sql-lra", "default")
    assert "sql-lora" in raised.value.metadata["suggestions"]
    with pytest.raises(NotFound) as raised:
        filled().resolve("secrt", "default")
    assert raised.value.metadata["suggestions"] == ""


def test_unknown_version_names_the_current_one():
    with pytest.raises(NotFound) as raised:
        filled().resolve("sql-lora@9", "default")
    assert raised.value.reason == "VERSION_NOT_FOUND"
    assert raised.value.metadata["current_version"] == "3"


def test_a_reference_with_nothing_after_the_at_is_invalid():
    with pytest.raises(NameInvalid, match=r"sql-lora@'; must be name, name@3"):
        filled().resolve("sql-lora@", "default")


def test_draining_or_deleted_adapters_are_not_found():
    names = filled()
    names.apply(NameMapUpdate(8, adapters=(entry(version=3, active=False),)))
    with pytest.raises(NotFound):
        names.resolve("sql-lora", "default")
    names.apply(NameMapUpdate(9, deleted=("sql-lora",)))
    with pytest.raises(NotFound):
        names.resolve("sql", "default")
    assert [item.name for item in names.list("default")] == ["shared"]


def test_update_that_is_not_newer_changes_nothing():
    names = filled()
    assert not names.apply(NameMapUpdate(7, deleted=("sql-lora",)))
    assert names.resolve("sql-lora", "default").version == 3
    assert names.apply(NameMapUpdate(8, aliases=(AliasEntry("sql", ""),)))
    with pytest.raises(NotFound):
        names.resolve("sql", "default")


def test_snapshot_makes_an_equal_replica_and_survives_pickling():
    names, replica = filled(), NameMap()
    replica.apply(pickle.loads(pickle.dumps(names.snapshot())))
    assert replica.snapshot() == names.snapshot()
    assert replica.revision == 7
    assert replica.resolve("sql-lora@1", "default") == names.resolve("sql-lora@1", "default")


def test_snapshot_replaces_even_a_newer_map():
    names = filled()
    names.apply(NameMapUpdate(2, snapshot=True))
    assert names.revision == 2
    assert names.list("default") == ()
