"""NAME|DIR of the tools: a PEFT folder here, or an adapter of a registry copied into one."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

from loraplex.adapter_format import parse_manifest
from loraplex.blobs import open_blob_store
from loraplex.channel import insecure_channel
from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from loraplex.status import DataLoss

DEFAULT_REGISTRY = "127.0.0.1:50051"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a tool needs to find its base model and adapter."""
    parser.add_argument("adapter", metavar="NAME|DIR", help="PEFT folder, or a registered name")
    parser.add_argument("--model", required=True, help="folder, or hub id in the local cache")
    parser.add_argument(
        "--served-model-name", default="", help="the base's name; default: the folder's"
    )
    parser.add_argument(
        "--base-model-alias", action="append", default=[], metavar="NAME",
        help="hub id or path by which adapters call this base; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--base-model-confirmed", action="store_true",
        help="the adapter was trained on this base although it names another one",
    )  # fmt: skip
    parser.add_argument(
        "--registry-address",
        default=os.environ.get("LORAPLEX_REGISTRY_ADDRESS", DEFAULT_REGISTRY),
        help="where a NAME is looked up [LORAPLEX_REGISTRY_ADDRESS]",
    )
    parser.add_argument(
        "--blob-store", default="", help="the registry's; default: .loraplex/registry/blobs"
    )
    parser.add_argument("--s3-endpoint-url", default=None, help="where s3:// is, if not at AWS")
    parser.add_argument("--tenant", default="", help="whose adapters; default: default")


def adapter_folder(arguments: argparse.Namespace, scratch: Path) -> Path:
    """The folder itself, or one in `scratch` with the files of a registered version.

    Raises: grpc.RpcError; LoraplexError of the blob store; DataLoss DIGEST_MISMATCH.
    """
    here = Path(arguments.adapter)
    if here.is_dir():
        return here
    metadata = (("x-loraplex-tenant", arguments.tenant),) if arguments.tenant else ()
    with insecure_channel(arguments.registry_address) as channel:
        stub = registry_pb2_grpc.AdapterRegistryStub(channel)
        request = registry_pb2.ResolveAdapterRequest(reference=arguments.adapter)
        found = stub.ResolveAdapter(request, timeout=10.0, metadata=metadata)
    url = arguments.blob_store or Path(".loraplex/registry/blobs").absolute().as_uri()
    store = open_blob_store(url, arguments.s3_endpoint_url)
    folder = scratch / str(found.adapter.name)
    folder.mkdir()
    for file in parse_manifest(found.version.manifest.canonical_json).files:
        digest = hashlib.sha256()
        with (folder / file.name).open("wb") as stream:
            for chunk in store.chunks(file.sha256):
                digest.update(chunk)
                stream.write(chunk)
        if digest.hexdigest() != file.sha256:
            raise DataLoss(f"{file.name} of {arguments.adapter!r} does not have its digest")
    return folder


def names_base(arguments: argparse.Namespace) -> bool:
    """Whether the adapter's own word on its base is to be held against --model.

    The registry has held a registered one against its base already.
    """
    return Path(arguments.adapter).is_dir() and not arguments.base_model_confirmed
