"""registryctl's commands about base models and tenants, and the check without a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from google.protobuf.field_mask_pb2 import FieldMask

from loraplex.adapter_format import BaseModelFacts, check_adapter, read_folder
from loraplex.base_folder import find_base_folder, read_base_folder
from loraplex.registry.v1 import registry_pb2 as pb
from registry_svc.cli.adapters import pages
from registry_svc.cli.client import Client
from registry_svc.cli.output import (
    print_fields,
    print_json,
    print_table,
    short,
    size,
    to_plain,
)
from registry_svc.facts import base_model_facts
from registry_svc.messages import read_base_model
from registry_svc.names import check_name


def add(args: argparse.Namespace) -> None:
    check_name("NAME", args.name)
    folder = find_base_folder(args.source)
    facts, config_json, weights_digest = read_base_folder(folder, args.name, tuple(args.alias))
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


def verify(args: argparse.Namespace) -> None:
    """The registry's check, here. With a base model's folder no server is asked."""
    checked = check_adapter(
        read_folder(Path(args.folder)).files,
        _facts(args),
        max_rank=args.max_lora_rank,
        max_saved_bytes=args.max_saved_bytes,
        base_model_confirmed=args.base_model_confirmed,
    )
    left = [f"{name}: {reason}" for name, reason in read_folder(Path(args.folder)).not_stored]
    rows = checked.report.rows
    if args.output == "json":
        print_json(
            {
                "digest": checked.manifest.digest,
                "base_model": checked.manifest.base_model,
                "max_rank": checked.spec.max_rank,
                "parameter_count": checked.spec.parameter_count,
                "weights_bytes": checked.spec.weights_bytes,
                "coverage": [
                    {
                        "module": row.module,
                        "layers": row.layers,
                        "rank": row.rank,
                        "scaling": row.scaling,
                        "bytes": row.num_bytes,
                    }
                    for row in rows
                ],
                "notes": list(checked.report.notes),
                "not_stored": left,
            }
        )
        return
    print_table(
        ("MODULE", "LAYERS", "RANK", "SCALING", "BYTES"),
        [(row.module, row.layers, row.rank, row.scaling, row.num_bytes) for row in rows],
    )
    print()
    print_fields(
        {
            "fits": checked.manifest.base_model,
            "digest": checked.manifest.digest,
            "parameters": checked.spec.parameter_count,
            "weights": size(checked.spec.weights_bytes),
            "notes": list(checked.report.notes),
            "not stored": left,
        }
    )


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


def _facts(args: argparse.Namespace) -> BaseModelFacts:
    """A folder if there is one of that name, else the registry's base model."""
    if Path(args.base_model).is_dir():
        name = args.base_model_name or Path(args.base_model).resolve().name
        aliases = (args.base_model, *args.alias)
        return read_base_folder(Path(args.base_model), name, aliases)[0]
    with Client(args) as client:
        request = pb.GetBaseModelRequest(name=args.base_model)
        found = client.call("GetBaseModel", request).base_model
    return base_model_facts(read_base_model(found))


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
