"""`enginectl state` and `enginectl models`: what a running engine says of itself."""

from __future__ import annotations

import argparse
import json
from typing import Any

from google.protobuf.json_format import MessageToDict

from engine_svc.cli.table import size, table
from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc

_TIERS = {
    engine_pb2.RESIDENCY_TIER_DISK: "disk",
    engine_pb2.RESIDENCY_TIER_HOST: "host",
    engine_pb2.RESIDENCY_TIER_SLOT: "slot",
}
_CLASSES = {engine_pb2.SERVICE_CLASS_BATCH: "batch"}


def show_state(arguments: argparse.Namespace) -> None:
    """Print GetEngineState. Raises: grpc.RpcError."""
    with insecure_channel(arguments.address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        request = engine_pb2.GetEngineStateRequest()
        state = stub.GetEngineState(request, timeout=arguments.timeout).state
    if arguments.output == "json":
        print(json.dumps(_as_json(state), indent=2))
        return
    print(
        f"engine {state.engine_id}  base {state.base_model}  revision {state.registry_revision}\n"
        f"max_loras {state.max_loras}  running {state.running_sequences}  "
        f"waiting {state.waiting_sequences}  steps {state.steps}"
    )
    memory = state.memory
    parts = ("weights", "kv", "adapters", "free", "workspace", "host_cache")
    rows = [(part, size(getattr(memory, f"{part}_bytes"))) for part in parts]
    print("\n" + table(("memory", "bytes"), rows))
    print(f"{memory.num_pages} pages of {size(memory.page_bytes)}")
    if state.residency:
        print("\n" + _residency(state))
    if state.flows:
        print("\n" + _flows(state))


def show_models(arguments: argparse.Namespace) -> None:
    """Print every model that the caller may use. Raises: grpc.RpcError."""
    models: list[engine_pb2.Model] = []
    metadata = (("x-loraplex-tenant", arguments.tenant),) if arguments.tenant else ()
    with insecure_channel(arguments.address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        request = engine_pb2.ListModelsRequest()
        while True:
            page = stub.ListModels(request, timeout=arguments.timeout, metadata=metadata)
            models.extend(page.models)
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
    if arguments.output == "json":
        print(json.dumps([_as_json(model) for model in models], indent=2))
        return
    rows = [
        (
            model.id,
            model.parent or "-",
            model.adapter.version or "-",
            model.max_rank or "-",
            model.context_tokens,
            model.adapter.digest[:19] or "-",
        )
        for model in models
    ]
    print(table(("model", "parent", "version", "rank", "context", "digest"), rows))


def _residency(state: engine_pb2.EngineState) -> str:
    rows = [
        (
            one.adapter.name,
            one.adapter.version,
            _TIERS.get(one.tier, "?"),
            size(one.bytes),
            "yes" if one.holds_place else "-",
            "yes" if one.pinned else "-",
        )
        for one in state.residency
    ]
    return table(("adapter", "version", "tier", "size", "place", "pinned"), rows)


def _flows(state: engine_pb2.EngineState) -> str:
    rows = [
        (
            flow.adapter.name or state.base_model,
            flow.tenant,
            _CLASSES.get(flow.service_class, "interactive"),
            flow.waiting,
            flow.running,
            flow.paused,
            flow.ring_position,
            f"{flow.waited_s:.2f}",
        )
        for flow in state.flows
    ]
    header = ("flow", "tenant", "class", "waiting", "running", "paused", "ring", "waited s")
    return table(header, rows)


def _as_json(message: Any) -> Any:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
