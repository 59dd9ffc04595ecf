"""Lists, updates and tenants: pages, filters, masks, etags, shares."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask
from sqlalchemy import insert

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.status import LoraplexError
from registry_svc.database import utc_now
from registry_svc.tables import AdapterRow
from tests.support.registry_service import Registry
from tests.support.tiny_adapters import BASE_NAME

pytest_plugins = ("tests.support.registry_fixtures",)


def test_ten_thousand_adapters_come_in_pages_each_once_in_order(registry: Registry) -> None:
    registry.add_base()
    names = [f"a-{number:05}" for number in range(10_000)]

    with registry.database.connect() as connection, connection.begin():
        connection.execute(insert(AdapterRow), [_row(name) for name in names])
    seen: list[str] = []
    token = ""
    while True:
        page = registry.call("ListAdapters", page_size=1000, page_token=token)
        seen += [item.name for item in page.adapters]
        token = page.next_page_token
        if not token:
            break
        assert len(page.adapters) == 1000
    assert seen == names
    few = registry.call("ListAdapters", name_prefix="a-0999")
    assert [item.name for item in few.adapters] == names[9990:]
    assert len(registry.call("ListAdapters").adapters) == 100


def test_filters_narrow_and_a_token_fits_only_its_list(registry: Registry) -> None:
    registry.add_base()
    registry.add_base("twin", ("org/twin",))
    for number in range(4):
        base = BASE_NAME if number % 2 else "twin"
        folder = registry.adapter(number, config={"base_model_name_or_path": base})
        registry.publish(f"a_{number}", folder, base_model=base)
    registry.publish("axe", registry.adapter(9))
    for fields, names in (
        ({}, ["a_0", "a_1", "a_2", "a_3", "axe"]),
        ({"base_model": "twin"}, ["a_0", "a_2"]),
        ({"base_model": "org/twin"}, ["a_0", "a_2"]),
        ({"name_prefix": "a_"}, ["a_0", "a_1", "a_2", "a_3"]),
        ({"tenant": "acme"}, []),
        ({"tenant": "default", "name_prefix": "a_3"}, ["a_3"]),
    ):
        found = [item.name for item in registry.call("ListAdapters", **fields).adapters]
        assert found == names, fields
    token = registry.call("ListAdapters", page_size=2).next_page_token
    for fields in (
        {"page_token": token, "base_model": "twin"},
        {"page_token": token[:-4]},
        {"page_token": "%%%"},
        {"page_token": "é"},
    ):
        assert registry.refused("ListAdapters", **fields).reason == "PAGE_TOKEN_INVALID", fields
    for size in (-1, 1001):
        assert registry.refused("ListAdapters", page_size=size).metadata["field"] == "page_size"
    models = registry.call("ListBaseModels", page_size=1)
    rest = registry.call("ListBaseModels", page_size=1, page_token=models.next_page_token)
    assert [item.name for item in (*models.base_models, *rest.base_models)] == [BASE_NAME, "twin"]


def test_an_update_changes_only_the_masked_fields(registry: Registry) -> None:
    registry.add_base()
    registry.publish("sql", registry.adapter(1), labels={"a": "1"}, description="old")
    done = _update(registry, ["description", "weight"], description="new", weight=2.5)
    assert (done.description, done.weight, dict(done.labels)) == ("new", 2.5, {"a": "1"})
    again = _update(registry, ["description"], description="new")
    assert again.etag == done.etag, "nothing changed"
    shown = _update(registry, ["visibility", "labels"], visibility=pb.VISIBILITY_PUBLIC)
    assert (shown.visibility, dict(shown.labels)) == (pb.VISIBILITY_PUBLIC, {})
    for mask, fields, field in (
        ([], {}, "update_mask"),
        (["name"], {}, "update_mask"),
        (["weight"], {"weight": math.nan}, "adapter.weight"),
        (["weight"], {"weight": -1.0}, "adapter.weight"),
        (["weight"], {"weight": math.inf}, "adapter.weight"),
        (["weight"], {"weight": 1e9}, "adapter.weight"),
        (["description"], {"description": "x" * 4097}, "description"),
        (["labels"], {"labels": {"a b": "1"}}, "labels key"),
        (["labels"], {"labels": {f"k{n}": "" for n in range(65)}}, "labels"),
        (["visibility"], {"visibility": 7}, "visibility"),
    ):
        refused = _update_refused(registry, mask, **fields)
        assert refused.code.name == "INVALID_ARGUMENT"
        assert refused.metadata["field"] == field
    assert registry.call("GetAdapter", name="sql").adapter == shown


def test_of_racing_updates_with_one_etag_exactly_one_wins(registry: Registry) -> None:
    registry.add_base()
    etag = registry.publish("sql", registry.adapter(1)).adapter.etag

    def update(number: int) -> str:
        try:
            _update(registry, ["description"], description=f"d{number}", etag=etag)
        except LoraplexError as error:
            return error.reason
        return "won"

    with ThreadPoolExecutor(6) as pool:
        ended = list(pool.map(update, range(6)))
    assert sorted(ended) == ["ETAG_MISMATCH"] * 5 + ["won"]
    for method in ("RollbackAdapter", "UnregisterAdapter"):
        refused = registry.refused(method, name="sql", etag=etag)
        assert (refused.code.name, refused.reason) == ("ABORTED", "ETAG_MISMATCH")


def test_tenants_have_shares_and_limits(registry: Registry) -> None:
    def update(mask: list[str], **fields: Any) -> Any:
        tenant = pb.Tenant(name="acme", **fields)
        request = {"tenant": tenant, "update_mask": FieldMask(paths=mask)}
        return registry.call("UpdateTenant", **request).tenant

    made = update(["weight", "max_queued_requests"], weight=3, max_queued_requests=10)
    assert (made.weight, made.max_queued_requests, made.max_queued_tokens) == (3, 10, 0)
    assert registry.call("GetTenant", name="acme").tenant == made
    assert update(["weight"]).weight == 1, "0 is read as 1"
    for mask, fields in (
        (["weight"], {"weight": math.nan}),
        (["weight"], {"weight": -2}),
        (["max_queued_requests"], {"max_queued_requests": -1}),
        (["name"], {}),
    ):
        tenant = pb.Tenant(name="acme", **fields)
        mask_message = FieldMask(paths=mask)
        refused = registry.refused("UpdateTenant", tenant=tenant, update_mask=mask_message)
        assert refused.reason == "FIELD_INVALID"
    stale = pb.Tenant(name="acme", etag=made.etag)
    refused = registry.refused(
        "UpdateTenant", tenant=stale, update_mask=FieldMask(paths=["max_queued_tokens"])
    )
    assert refused.reason == "ETAG_MISMATCH"


def _update(registry: Registry, mask: list[str], **fields: Any) -> Any:
    adapter = pb.Adapter(name="sql", **fields)
    return registry.call(
        "UpdateAdapter", adapter=adapter, update_mask=FieldMask(paths=mask)
    ).adapter


def _update_refused(registry: Registry, mask: list[str], **fields: Any) -> LoraplexError:
    adapter = pb.Adapter(name="sql", **fields)
    return registry.refused("UpdateAdapter", adapter=adapter, update_mask=FieldMask(paths=mask))


def _row(name: str) -> dict[str, Any]:
    now = utc_now()
    return {
        "name": name,
        "tenant": "default",
        "base_model": BASE_NAME,
        "state": "ACTIVE",
        "current_version": 1,
        "last_version": 1,
        "public": False,
        "labels": {},
        "description": "",
        "weight": 1.0,
        "generation": 1,
        "create_time": now,
        "update_time": now,
    }
