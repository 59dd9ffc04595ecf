"""`enginectl state` and `enginectl models`: what a running engine says of itself."""

from __future__ import annotations

import argparse

from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.printing import print_json, print_table, short, size, to_plain
from loraplex.tenants import tenant_metadata

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
        print_json(to_plain(state))
        return
    print(
        f"engine {state.engine_id}  base {state.base_model}  revision {state.registry_revision}\n"
        f"max_loras {state.max_loras}  running {state.running_sequences}  "
        f"waiting {state.waiting_sequences}  steps {state.steps}"
    )
    memory = state.memory
    parts = ("weights", "kv", "adapters", "free", "workspace", "host_cache")
    rows = [(part, size(getattr(memory, f"{part}_bytes"))) for part in parts]
    print()
    print_table(("memory", "bytes"), rows)
    print(f"{memory.num_pages} pages of {size(memory.page_bytes)}")
    if state.residency:
        print()
        _print_residency(state)
    if state.flows:
        print()
        _print_flows(state)


def show_models(arguments: argparse.Namespace) -> None:
    """Print every model that the caller may use. Raises: grpc.RpcError."""
    models: list[engine_pb2.Model] = []
    metadata = tenant_metadata(arguments.tenant)
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
        print_json([to_plain(model) for model in models])
        return
    rows = [
        (
            model.id,
            model.parent or "-",
            model.adapter.version or "-",
            model.max_rank or "-",
            model.context_tokens,
            short(model.adapter.digest) or "-",
        )
        for model in models
    ]
    print_table(("model", "parent", "version", "rank", "context", "digest"), rows)


def _print_residency(state: engine_pb2.EngineState) -> None:
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
    print_table(("adapter", "version", "tier", "size", "place", "pinned"), rows)


def _print_flows(state: engine_pb2.EngineState) -> None:
    rows = [
        (
            flow.adapter.name or state.base_model,
            flow.tenant,
            _CLASSES.get(flow.service_class, "interactive"),
            flow.waiting,
            flow.running,
            flow.paused,
            flow.ring_position,
            round(flow.waited_s, 2),
        )
        for flow in state.flows
    ]
    header = ("flow", "tenant", "class", "waiting", "running", "paused", "ring", "waited s")
    print_table(header, rows)
