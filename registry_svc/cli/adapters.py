"""registryctl's commands about adapters."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.field_mask_pb2 import FieldMask

from loraplex.adapter_format import parse_manifest
from loraplex.printing import (
    enum_name,
    print_fields,
    print_json,
    print_table,
    short,
    size,
    to_plain,
)
from loraplex.registry.v1 import registry_pb2 as pb
from registry_svc.cli.chat import chat_fields
from registry_svc.cli.client import Client, read_labels
from registry_svc.names import check_name


def register(args: argparse.Namespace) -> None:
    check_name("NAME", args.name)
    request = pb.RegisterAdapterRequest(
        name=args.name,
        base_model=args.base_model,
        base_model_confirmed=args.base_model_confirmed,
        visibility=pb.VISIBILITY_PUBLIC if args.public else pb.VISIBILITY_UNSPECIFIED,
        labels=read_labels(args.label),
        description=args.description,
        request_id=args.request_id,
    )
    with Client(args) as client:
        sent, left = "", list[str]()
        if "://" in args.source:
            request.source_uri = args.source
        else:
            uploaded = client.upload(Path(args.source))
            request.upload_id = uploaded.upload_id
            sent = f"{uploaded.sent_files} files, {size(uploaded.sent_bytes)}"
            left = list(uploaded.not_stored)
        done = client.call("RegisterAdapter", request)
    left += done.not_stored
    if args.output == "json":
        print_json({**to_plain(done), "not_stored": left})
        return
    what = "registered" if done.created else "unchanged"
    print_fields(
        {
            what: f"{done.adapter.name} version {done.version.version}",
            "digest": done.version.manifest.digest,
            "base model": done.version.base_model,
            "rank": done.version.max_rank,
            "weights": size(done.version.weights_bytes),
            "sent": sent,
            "not stored": ", ".join(left),
            "notice": done.notice,
        }
    )


def unregister(args: argparse.Namespace) -> None:
    request = pb.UnregisterAdapterRequest(
        name=args.name, drain_seconds=args.drain_seconds, etag=args.etag
    )
    with Client(args) as client:
        done = client.call("UnregisterAdapter", request)
    if args.output == "json":
        print_json(to_plain(done))
        return
    print_fields(
        {
            "unregistered": done.adapter.name,
            "state": _state(done.adapter),
            "revision": done.revision,
            "confirmed by": list(done.confirmed_by),
            "unreachable": list(done.unreachable),
        }
    )


def list_adapters(args: argparse.Namespace) -> None:
    request = pb.ListAdaptersRequest(
        page_size=1000,
        base_model=args.base_model,
        name_prefix=args.prefix,
        include_inactive=args.all,
    )
    with Client(args) as client:
        found = list(pages(client, "ListAdapters", request, "adapters"))
    if args.output == "json":
        print_json([to_plain(item) for item in found])
        return
    rows = [
        (
            item.name, item.current_version, item.base_model, _state(item), item.tenant,
            enum_name(pb.Visibility.Name(item.visibility), "VISIBILITY_"), dict(item.labels),
        )
        for item in found
    ]  # fmt: skip
    print_table(("NAME", "VERSION", "BASE MODEL", "STATE", "TENANT", "VISIBILITY", "LABELS"), rows)


def show(args: argparse.Namespace) -> None:
    with Client(args) as client:
        found = client.call("GetAdapter", pb.GetAdapterRequest(name=args.name))
    if args.output == "json":
        print_json(to_plain(found))
        return
    _print_adapter(found.adapter, found.current, list(found.aliases))


def versions(args: argparse.Namespace) -> None:
    request = pb.ListAdapterVersionsRequest(name=args.name, page_size=1000)
    with Client(args) as client:
        found = list(pages(client, "ListAdapterVersions", request, "versions"))
    if args.output == "json":
        print_json([to_plain(item) for item in found])
        return
    rows = [
        (
            item.version, short(item.manifest.digest), item.max_rank, item.parameter_count,
            size(item.weights_bytes), item.create_time.ToJsonString(),
        )
        for item in found
    ]  # fmt: skip
    print_table(("VERSION", "DIGEST", "RANK", "PARAMETERS", "WEIGHTS", "CREATED"), rows)


def update(args: argparse.Namespace) -> None:
    adapter, paths = pb.Adapter(name=args.name, etag=args.etag), list[str]()
    if args.weight is not None:
        adapter.weight = args.weight
        paths.append("weight")
    if args.description is not None:
        adapter.description = args.description
        paths.append("description")
    if args.label is not None:
        adapter.labels.update(read_labels(args.label))
        paths.append("labels")
    if args.public is not None:
        adapter.visibility = pb.VISIBILITY_PUBLIC if args.public else pb.VISIBILITY_PRIVATE
        paths.append("visibility")
    request = pb.UpdateAdapterRequest(adapter=adapter, update_mask=FieldMask(paths=paths))
    with Client(args) as client:
        done = client.call("UpdateAdapter", request)
    if args.output == "json":
        print_json(to_plain(done))
        return
    _print_adapter(done.adapter, None, [])


def rollback(args: argparse.Namespace) -> None:
    request = pb.RollbackAdapterRequest(name=args.name, version=args.version, etag=args.etag)
    with Client(args) as client:
        done = client.call("RollbackAdapter", request)
    if args.output == "json":
        print_json(to_plain(done))
        return
    _print_adapter(done.adapter, done.current, [])


def alias(args: argparse.Namespace) -> None:
    request = pb.SetAliasRequest(
        alias=args.alias, adapter="" if args.remove else args.adapter or "", version=args.version
    )
    with Client(args) as client:
        done = client.call("SetAlias", request)
    if args.output == "json":
        print_json(to_plain(done))
        return
    target = f"{done.adapter}@{done.version}" if done.version else done.adapter
    print(f"{done.alias} → {target}" if done.adapter else f"{done.alias} removed")


def resolve(args: argparse.Namespace) -> None:
    with Client(args) as client:
        found = client.call("ResolveAdapter", pb.ResolveAdapterRequest(reference=args.reference))
    if args.output == "json":
        print_json(to_plain(found))
        return
    _print_adapter(found.adapter, found.version, [])


def watch(args: argparse.Namespace) -> None:
    """One line an event; --once ends when nothing is missing."""
    with Client(args) as client:
        for item in client.watch(args.from_revision):
            if item.WhichOneof("item") == "caught_up_revision":
                if args.once:
                    return
                continue
            if args.output == "json":
                print_json(to_plain(item.event))
            else:
                print(_event_line(item.event))
            sys.stdout.flush()


def pages(client: Client, method: str, request: Any, field: str) -> Iterator[Any]:
    """Every item of a list, page by page."""
    while True:
        page = client.call(method, request)
        yield from getattr(page, field)
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _print_adapter(
    adapter: pb.Adapter, version: pb.AdapterVersion | None, aliases: list[str]
) -> None:
    fields: dict[str, object] = {
        "name": adapter.name,
        "version": version.version if version else adapter.current_version,
        "base model": adapter.base_model,
        "state": _state(adapter),
        "tenant": adapter.tenant,
        "visibility": enum_name(pb.Visibility.Name(adapter.visibility), "VISIBILITY_"),
        "weight": adapter.weight,
        "labels": dict(adapter.labels),
        "aliases": aliases,
        "description": adapter.description,
        "etag": adapter.etag,
        "updated": adapter.update_time.ToJsonString(),
    }
    if version is not None:
        fields["digest"] = version.manifest.digest
        fields["rank"] = version.max_rank
        fields["weights"] = size(version.weights_bytes)
        files = [f"{file.name} ({size(file.size_bytes)})" for file in version.manifest.files]
        fields["files"] = files
        fields |= chat_fields(parse_manifest(version.manifest.canonical_json))
    print_fields(fields)


def _event_line(event: pb.Event) -> str:
    kind = enum_name(pb.EventType.Name(event.type), "EVENT_TYPE_")
    subject = event.adapter.name or event.base_model.name or event.alias.alias or event.tenant.name
    more = ""
    if event.HasField("adapter"):
        more = f" version {event.version.version} {_state(event.adapter)}"
    elif event.HasField("alias"):
        more = f" → {event.alias.adapter or 'nothing'}"
    return f"{event.revision}  {event.time.ToJsonString()}  {kind}  {subject}{more}"


def _state(adapter: pb.Adapter) -> str:
    return enum_name(pb.AdapterState.Name(adapter.state), "ADAPTER_STATE_")
