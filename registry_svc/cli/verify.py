"""`registryctl verify`: the registry's check of a folder, and where every byte of it lands."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from loraplex.adapter_format import (
    AdapterSpec,
    BaseModelFacts,
    CheckedAdapter,
    check_adapter,
    read_folder,
)
from loraplex.base_folder import read_base_folder
from loraplex.printing import print_fields, print_json, print_table, size
from loraplex.registry.v1 import registry_pb2 as pb
from registry_svc.cli.chat import chat_fields, chat_json
from registry_svc.cli.client import Client
from registry_svc.facts import base_model_facts
from registry_svc.messages import read_base_model

#: bytes of a number in the arena of an engine on a GPU, and on a CPU
_GPU_ITEM_BYTES, _CPU_ITEM_BYTES = 2, 4


def verify(args: argparse.Namespace) -> None:
    """With a base model's folder no server is asked. Raises: AdapterRefused, and so exit code 4."""
    folder = read_folder(Path(args.folder))
    checked = check_adapter(
        folder.files,
        _facts(args),
        max_rank=args.max_lora_rank,
        base_model_confirmed=args.base_model_confirmed,
        max_saved_bytes=args.max_saved_bytes,
    )
    left = [f"{name}: {reason}" for name, reason in folder.not_stored]
    if args.output == "json":
        print_json(_as_json(checked, left))
        return
    rows = checked.report.rows
    print_table(
        ("MODULE", "LAYERS", "RANK", "SCALING", "BYTES"),
        [(row.module, row.layers, row.rank or "whole", row.scaling, row.num_bytes) for row in rows],
    )
    print()
    spec = checked.spec
    gpu, cpu = (size(arena_bytes(spec, item)) for item in (_GPU_ITEM_BYTES, _CPU_ITEM_BYTES))
    print_fields(
        {
            "fits": checked.manifest.base_model,
            "digest": checked.manifest.digest,
            "parameters": spec.parameter_count,
            "weights": size(spec.weights_bytes),
            "in the engine": f"{gpu} on a GPU (bfloat16), {cpu} on a CPU (float32), in whole pages",
            **chat_fields(checked.manifest),
            "notes": list(checked.report.notes),
            "not stored": left,
        }
    )


def arena_bytes(spec: AdapterSpec, item_bytes: int) -> int:
    """Bytes that the adapter takes of an engine's arena, about: gains and constants, which have
    fp32 there, and what is left of the last page come on top."""
    return sum(math.prod(tensor.shape) for tensor in spec.parts.tensors) * item_bytes


def _as_json(checked: CheckedAdapter, left: list[str]) -> dict[str, Any]:
    spec = checked.spec
    return {
        "digest": checked.manifest.digest,
        "base_model": checked.manifest.base_model,
        "max_rank": spec.max_rank,
        "parameter_count": spec.parameter_count,
        "weights_bytes": spec.weights_bytes,
        "estimated_gpu_bytes": arena_bytes(spec, _GPU_ITEM_BYTES),
        "estimated_cpu_bytes": arena_bytes(spec, _CPU_ITEM_BYTES),
        "coverage": [
            {
                "module": row.module,
                "layers": row.layers,
                "num_layers": row.num_layers,
                "rank": row.rank or None,
                "scaling": row.scaling,
                "bytes": row.num_bytes,
            }
            for row in checked.report.rows
        ],
        **chat_json(checked.manifest),
        "notes": list(checked.report.notes),
        "not_stored": left,
    }


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
