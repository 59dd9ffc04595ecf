"""Publishing: versions, idempotency, names, rollback, aliases, the end of an adapter."""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.status import LoraplexError
from tests.support.registry_service import Registry, base_message
from tests.support.tiny_adapters import BASE_NAME

BAD_NAMES = (
    "", "../x", "a/b", "A", ".hidden", "-x", "a b", "a\x00", "é", "x" * 129, "a@1", "a\n",
)  # fmt: skip
CAUSE = ("INVALID_ARGUMENT", "NAME_INVALID")
WEIGHT = FieldMask(paths=["weight"])

pytest_plugins = ("tests.support.registry_fixtures",)


def test_a_published_adapter_resolves_by_name_version_and_digest(registry: Registry) -> None:
    registry.add_base()
    done = registry.publish("sql", registry.adapter(1), labels={"team": "db"}, description="SQL")
    assert done.created
    assert (done.version.version, done.version.max_rank) == (1, 4)
    assert dict(done.adapter.labels) == {"team": "db"}
    digest = done.version.manifest.digest
    for reference in ("sql", "sql@1", f"sql@{digest}"):
        found = registry.call("ResolveAdapter", reference=reference)
        assert found.version.manifest.digest == digest
        assert found.revision == 2
    for file in done.version.manifest.files:
        stored = b"".join(registry.store.chunks(file.sha256))
        assert len(stored) == file.size_bytes


def test_the_same_content_again_changes_nothing(registry: Registry) -> None:
    registry.add_base()
    folder = registry.adapter(1)
    first = registry.publish("sql", folder)
    again = registry.publish("sql", folder)
    assert not again.created
    assert again.version == first.version
    assert again.adapter.etag == first.adapter.etag
    assert registry.call("ResolveAdapter", reference="sql").revision == 2


def test_older_content_moves_nothing_and_the_notice_names_rollback(registry: Registry) -> None:
    registry.add_base()
    old, new = registry.adapter(1), registry.adapter(2)
    registry.publish("sql", old)
    registry.publish("sql", new)
    again = registry.publish("sql", old)
    assert (again.created, again.version.version, again.adapter.current_version) == (False, 1, 2)
    assert "registryctl rollback sql --version 1" in again.notice
    back = registry.call("RollbackAdapter", name="sql")
    assert (back.adapter.current_version, back.current.version) == (1, 1)
    third = registry.publish("sql", registry.adapter(3))
    assert third.version.version == 3, "numbers are never reused"
    listed = registry.call("ListAdapterVersions", name="sql").versions
    assert [item.version for item in listed] == [3, 2, 1]
    first_page = registry.call("ListAdapterVersions", name="sql", page_size=2)
    rest = registry.call(
        "ListAdapterVersions", name="sql", page_size=2, page_token=first_page.next_page_token
    )
    assert [item.version for item in (*first_page.versions, *rest.versions)] == [3, 2, 1]


def test_a_request_id_answers_the_same_request_from_memory(registry: Registry) -> None:
    registry.add_base()
    folder = registry.adapter(1)
    upload_id = registry.upload({path.name: path.read_bytes() for path in folder.iterdir()})
    fields = {"name": "sql", "base_model": BASE_NAME, "upload_id": upload_id, "request_id": "r-1"}
    first = registry.call("RegisterAdapter", **fields)
    again = registry.call("RegisterAdapter", **fields)
    assert first.created
    assert again == first, "although the upload is used up"
    other = registry.refused("RegisterAdapter", **{**fields, "name": "other"})
    assert (other.code.name, other.reason) == ("ABORTED", "REQUEST_ID_REUSED")
    base = {"base_model": base_message("b2"), "request_id": "r-2"}
    assert registry.call("RegisterBaseModel", **base).created
    assert registry.call("RegisterBaseModel", **base).created


@pytest.mark.parametrize("same_content", [True, False], ids=["same", "different"])
def test_concurrent_registers_of_one_name_give_one_version_a_content(
    registry: Registry,
    same_content: bool,
) -> None:
    registry.add_base()
    folders = [registry.adapter(1 if same_content else seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda folder: registry.publish("sql", folder), folders))
    count = 1 if same_content else 6
    assert sum(item.created for item in done) == count
    assert {item.version.version for item in done} == set(range(1, count + 1))
    assert len({item.version.manifest.digest for item in done}) == count
    assert registry.call("GetAdapter", name="sql").adapter.current_version == count


def test_a_name_that_could_be_a_path_or_reference_is_refused(registry: Registry) -> None:
    registry.add_base()
    for name in BAD_NAMES:
        for method, fields in (
            ("RegisterAdapter", {"name": name, "base_model": BASE_NAME, "upload_id": "0" * 32}),
            ("GetAdapter", {"name": name}),
            ("SetAlias", {"alias": name, "adapter": "sql"}),
            ("RegisterBaseModel", {"base_model": base_message(name)}),
            ("UpdateTenant", {"tenant": pb.Tenant(name=name), "update_mask": WEIGHT}),
        ):
            refused = registry.refused(method, **fields)
            case = (method, name)
            assert (refused.code.name, refused.reason) == CAUSE, case
            assert {"field", "value", "limit"} <= refused.metadata.keys(), case


def test_one_name_means_one_thing_in_both_directions(registry: Registry) -> None:
    registry.add_base(aliases=("org/tiny", "tiny-alias"))
    for name in (BASE_NAME, "tiny-alias"):
        with pytest.raises(LoraplexError) as caught:
            registry.publish(name, registry.adapter(1))
        assert caught.value.reason == "NAME_TAKEN"
    registry.publish("sql", registry.adapter(1))
    registry.call("SetAlias", alias="prod", adapter="sql")
    for name in ("sql", "prod"):
        taken = registry.refused("RegisterBaseModel", base_model=base_message(name))
        assert taken.reason == "NAME_TAKEN"
        model = base_message("other", (name,))
        assert registry.refused("RegisterBaseModel", base_model=model).reason == "NAME_TAKEN"
    assert registry.refused("SetAlias", alias="sql", adapter="sql").reason == "NAME_TAKEN"
    assert registry.refused("GetBaseModel", name="other").reason == "BASE_MODEL_NOT_FOUND"


def test_a_base_model_takes_new_aliases_but_no_other_weights(registry: Registry) -> None:
    assert registry.add_base().created
    more = registry.add_base(aliases=("org/tiny", "/models/tiny"))
    assert not more.created
    assert set(more.base_model.aliases) == {"org/tiny", "/models/tiny"}
    found = registry.call("GetBaseModel", name="/models/tiny").base_model
    assert found == more.base_model
    changed = base_message()
    changed.weights_digest = "sha256:" + "0" * 64
    refused = registry.refused("RegisterBaseModel", base_model=changed)
    assert refused.reason == "NAME_TAKEN"


def test_an_alias_follows_or_stays_and_can_be_removed(registry: Registry) -> None:
    registry.add_base()
    registry.publish("sql", registry.adapter(1))
    registry.call("SetAlias", alias="latest", adapter="sql")
    registry.call("SetAlias", alias="stable", adapter="sql", version=1)
    registry.publish("sql", registry.adapter(2))
    assert registry.call("ResolveAdapter", reference="latest").version.version == 2
    assert registry.call("ResolveAdapter", reference="stable").version.version == 1
    assert registry.call("ResolveAdapter", reference="stable@2").version.version == 2
    assert set(registry.call("GetAdapter", name="sql").aliases) == {"latest", "stable"}
    missing = registry.refused("SetAlias", alias="stable", adapter="sql", version=9)
    assert missing.reason == "VERSION_NOT_FOUND"
    registry.call("SetAlias", alias="latest")
    assert registry.refused("ResolveAdapter", reference="latest").reason == "ADAPTER_NOT_FOUND"
    registry.publish("latest", registry.adapter(3))


def test_unknown_references_suggest_only_what_the_caller_may_use(registry: Registry) -> None:
    registry.add_base()
    registry.publish("sql-lora", registry.adapter(1), tenant="acme")
    registry.publish("sql-loro", registry.adapter(2))
    unknown = registry.refused("ResolveAdapter", reference="sql-lor")
    assert (unknown.code.name, unknown.reason) == ("NOT_FOUND", "ADAPTER_NOT_FOUND")
    assert unknown.metadata["suggestions"] == "sql-loro"
    assert registry.refused("ResolveAdapter", reference="sql-loro@7").reason == "VERSION_NOT_FOUND"
    assert registry.refused("ResolveAdapter", reference="sql-lora").reason == "ADAPTER_NOT_FOUND"
    for bad in ("sql@", "sql@x", "sql@sha256:00", "sql@0", "../sql"):
        assert registry.refused("ResolveAdapter", reference=bad).reason == "NAME_INVALID"


def test_another_tenants_adapter_does_not_exist_unless_public(registry: Registry) -> None:
    registry.add_base()
    registry.publish("mine", registry.adapter(1), tenant="acme")
    registry.publish("ours", registry.adapter(2), tenant="acme", visibility=pb.VISIBILITY_PUBLIC)
    assert registry.refused("GetAdapter", name="mine").reason == "ADAPTER_NOT_FOUND"
    assert registry.call("GetAdapter", name="ours").adapter.tenant == "acme"
    assert [item.name for item in registry.call("ListAdapters").adapters] == ["ours"]
    refused = registry.refused("UnregisterAdapter", name="ours")
    assert (refused.code.name, refused.reason) == ("PERMISSION_DENIED", "TENANT_FORBIDDEN")
    with pytest.raises(LoraplexError) as caught:
        registry.publish("mine", registry.adapter(3))
    assert caught.value.reason == "NAME_TAKEN"
    assert registry.refused("GetTenant", name="nobody").reason == "TENANT_NOT_FOUND"
    assert registry.call("GetTenant", name="acme").tenant.weight == 1


def test_an_unregistered_adapter_drains_ends_and_can_come_back(registry: Registry) -> None:
    registry.add_base()
    folder = registry.adapter(1)
    registry.publish("sql", folder)
    registry.publish("sql", registry.adapter(2))
    registry.call("SetAlias", alias="prod", adapter="sql")
    ended = registry.call("UnregisterAdapter", name="sql", drain_seconds=600)
    assert ended.adapter.state == pb.ADAPTER_STATE_DRAINING
    assert ended.revision == 5
    assert registry.call("UnregisterAdapter", name="sql").revision == 5, "idempotent"
    draining = registry.refused("ResolveAdapter", reference="sql")
    assert draining.reason == "VERSION_NOT_ACTIVE"
    deadline = dt.datetime.fromisoformat(draining.metadata["drain_deadline"])
    assert 590 < (deadline - registry.clock()).total_seconds() <= 600
    assert f"drains until {draining.metadata['drain_deadline']}" in draining.message
    assert registry.refused("RollbackAdapter", name="sql").reason == "VERSION_NOT_ACTIVE"
    with pytest.raises(LoraplexError) as caught:
        registry.publish("sql", folder)
    assert caught.value.reason == "VERSION_NOT_ACTIVE"
    registry.clock.advance(601)
    registry.server._adapters.finish_drains()
    for reference in ("sql", "sql@1", "prod"):
        assert registry.refused("ResolveAdapter", reference=reference).code.name == "NOT_FOUND"
    inactive = registry.call("ListAdapters", include_inactive=True).adapters
    assert [item.state for item in inactive] == [pb.ADAPTER_STATE_DELETED]
    assert not registry.call("ListAdapters").adapters
    back = registry.publish("sql", folder)
    assert not back.created
    assert "active again" in back.notice
    assert registry.call("ResolveAdapter", reference="sql").version.version == 1
    assert registry.refused("ResolveAdapter", reference="sql@2").reason == "VERSION_NOT_FOUND"
    assert registry.publish("sql", registry.adapter(3)).version.version == 3


def test_a_version_for_another_base_model_is_refused(registry: Registry) -> None:
    registry.add_base()
    registry.add_base("twin", ())
    registry.publish("sql", registry.adapter(1))
    with pytest.raises(LoraplexError) as caught:
        registry.publish("sql", registry.adapter(2), base_model="twin", base_model_confirmed=True)
    assert caught.value.reason == "BASE_MODEL_MISMATCH"
    assert registry.call("GetAdapter", name="sql").adapter.current_version == 1
