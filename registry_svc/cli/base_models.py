"""registryctl's commands about base models and tenants."""

from __future__ import annotations

import argparse

from google.protobuf.field_mask_pb2 import FieldMask

from loraplex.base_folder import find_base_folder, read_base_folder
from loraplex.printing import (
    print_fields,
    print_json,
    print_table,
    short,
    to_plain,
)
from loraplex.registry.v1 import registry_pb2 as pb
from registry_svc.cli.adapters import pages
from registry_svc.cli.client import Client
from registry_svc.names import check_name


def add(args: argparse.Namespace) -> None:
    check_name("NAME", args.name)
    folder = find_base_folder(args.source)
    facts, config_json, weights_digest = read_base_folder(
        folder, args.name, tuple(args.alias), dummy_weights=args.dummy_weights
    )
    model = pb.BaseModel(
        name=args.name,
        weights_digest=weights_digest,
        aliases=args.alias,
        config_json=config_json,
        vocabulary_digest=facts.vocabulary_digest,
        chat_template_digest=facts.chat_template_digest,
        eos_token_ids=facts.eos_token_ids,
    )
    with Client(args) as client:
        done = client.call("RegisterBaseModel", pb.RegisterBaseModelRequest(base_model=model))
    if args.output == "json":
        print_json(to_plain(done))
        return
    _print_model(done.base_model, "added" if done.created else "exists")


def alias(args: argparse.Namespace) -> None:
    with Client(args) as client:
        found = client.call("GetBaseModel", pb.GetBaseModelRequest(name=args.name)).base_model
        found.aliases.extend(args.alias)
        request = pb.RegisterBaseModelRequest(base_model=found)
        done = client.call("RegisterBaseModel", request)
    if args.output == "json":
        print_json(to_plain(done))
        return
    _print_model(done.base_model, "name")


def list_models(args: argparse.Namespace) -> None:
    request = pb.ListBaseModelsRequest(page_size=1000)
    with Client(args) as client:
        found = list(pages(client, "ListBaseModels", request, "base_models"))
    if args.output == "json":
        print_json([to_plain(item) for item in found])
        return
    rows = [(item.name, short(item.weights_digest), list(item.aliases)) for item in found]
    print_table(("NAME", "WEIGHTS", "ALIASES"), rows)


def show(args: argparse.Namespace) -> None:
    with Client(args) as client:
        found = client.call("GetBaseModel", pb.GetBaseModelRequest(name=args.name))
    if args.output == "json":
        print_json(to_plain(found))
        return
    _print_model(found.base_model, "name")


def tenant_show(args: argparse.Namespace) -> None:
    with Client(args) as client:
        found = client.call("GetTenant", pb.GetTenantRequest(name=args.name)).tenant
    _print_tenant(args, found)


def tenant_update(args: argparse.Namespace) -> None:
    tenant, paths = pb.Tenant(name=args.name, etag=args.etag), list[str]()
    for field in ("weight", "max_queued_requests", "max_queued_tokens"):
        value = getattr(args, field)
        if value is not None:
            setattr(tenant, field, value)
            paths.append(field)
    request = pb.UpdateTenantRequest(tenant=tenant, update_mask=FieldMask(paths=paths))
    with Client(args) as client:
        _print_tenant(args, client.call("UpdateTenant", request).tenant)


def _print_model(model: pb.BaseModel, title: str) -> None:
    print_fields(
        {
            title: model.name,
            "weights": model.weights_digest,
            "aliases": list(model.aliases),
            "end tokens": list(model.eos_token_ids),
            "etag": model.etag,
        }
    )


def _print_tenant(args: argparse.Namespace, tenant: pb.Tenant) -> None:
    if args.output == "json":
        print_json(to_plain(tenant))
        return
    print_fields(
        {
            "name": tenant.name,
            "weight": tenant.weight,
            "max queued requests": tenant.max_queued_requests or "no limit",
            "max queued tokens": tenant.max_queued_tokens or "no limit",
            "etag": tenant.etag,
        }
    )
