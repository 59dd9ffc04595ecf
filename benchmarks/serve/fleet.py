"""Many adapter versions over few weights: published through the registry's own API, quickly.

Two versions differ in lora_alpha, hence in their manifests and digests; eight weight files are
shared, so that a thousand adapters take the room of eight. To everything behind the registry they
are a thousand adapters: each is fetched, packed, kept and evicted by its own digest.

A thousand publishes copy and check 84 GB. Since every byte here is the same on every machine, a
registry's database may be filled once and carried elsewhere, where only the blobs are written anew.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.shared.random_files import RandomNumbers, write_safetensors
from loraplex.adapter_format import CONFIG_FILE, WEIGHTS_FILE
from loraplex.base_model import LAYER_MODULES, BaseModelSpec, module_path
from loraplex.blobs import open_blob_store
from loraplex.channel import insecure_channel
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc

CHUNK_BYTES = 1 << 20
CALL_TIMEOUT_S = 300.0


def adapter_names(count: int, pattern: str = "adapter-{index:04d}") -> tuple[str, ...]:
    """Most popular first."""
    return tuple(pattern.format(index=index) for index in range(count))


class FleetFiles:
    """What a fleet of adapters consists of: `num_weights` files on disk, and a config each."""

    def __init__(
        self, folder: Path, base_name: str, spec: BaseModelSpec, rank: int, num_weights: int
    ) -> None:
        """Writes the weight files."""
        self.base_name, self._spec, self._rank = base_name, spec, rank
        folder.mkdir(parents=True, exist_ok=True)
        self.weights: list[tuple[pb.File, Path]] = []
        for index in range(num_weights):
            path = folder / f"weights-{index}.safetensors"
            write_safetensors(path, self._shapes(), RandomNumbers.reproducible(index))
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = path.stat().st_size
            self.weights.append((pb.File(name=WEIGHTS_FILE, size_bytes=size, sha256=digest), path))

    def config(self, index: int) -> bytes:
        """adapter_config.json of the index-th adapter: its alpha is nobody else's."""
        config = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self._rank,
            "lora_alpha": 2 * self._rank + index / 1024,
            "base_model_name_or_path": self.base_name, "target_modules": list(LAYER_MODULES),
        }  # fmt: skip
        return json.dumps(config).encode()

    def put_weights(self, blob_store_url: str) -> None:
        """Write what engines read into the store, without a registry."""
        store = open_blob_store(blob_store_url)
        for entry, path in self.weights:
            with path.open("rb") as file:
                store.put(entry.sha256, file, entry.size_bytes)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(self._spec.num_layers):
            for module in LAYER_MODULES:
                name = f"base_model.model.{module_path(layer, module)}"
                in_features, out_features = self._spec.module_shape(module)
                shapes[f"{name}.lora_A.weight"] = (self._rank, in_features)
                shapes[f"{name}.lora_B.weight"] = (out_features, self._rank)
        return shapes


def publish(address: str, files: FleetFiles, names: Sequence[str], clients: int) -> float:
    """One version for each name; the registry knows the base model. Returns: seconds.

    Raises: grpc.RpcError of the first that fails.
    """
    began = time.monotonic()
    with insecure_channel(address) as channel:
        stub = registry_pb2_grpc.AdapterRegistryStub(channel)
        for entry, path in files.weights:
            _upload(stub, [entry], {entry.sha256: path})
        with ThreadPoolExecutor(clients) as pool:
            tasks = [
                pool.submit(_register, stub, files, name, index) for index, name in enumerate(names)
            ]
            for task in tasks:
                task.result()
    return time.monotonic() - began


def _register(stub: Any, files: FleetFiles, name: str, index: int) -> None:
    weights = files.weights[index % len(files.weights)][0]
    text = files.config(index)
    digest = hashlib.sha256(text).hexdigest()
    config = pb.File(name=CONFIG_FILE, size_bytes=len(text), sha256=digest)
    upload_id = _upload(stub, [config, weights], {digest: text})
    request = pb.RegisterAdapterRequest(
        name=name, base_model=files.base_name, upload_id=upload_id,
        visibility=pb.VISIBILITY_PUBLIC,
    )  # fmt: skip
    stub.RegisterAdapter(request, timeout=CALL_TIMEOUT_S)


def _upload(stub: Any, files: Sequence[pb.File], contents: dict[str, Path | bytes]) -> str:
    """Start an upload and send what the store lacks of it. Returns: its id."""
    request = pb.StartUploadRequest(files=files)
    started = stub.StartUpload(request, timeout=CALL_TIMEOUT_S)
    sizes = {file.sha256: file.size_bytes for file in files}
    for digest in started.missing_sha256:
        header = pb.UploadBlobRequest.Header(
            upload_id=started.upload_id, sha256=digest, size_bytes=sizes[digest]
        )
        stub.UploadBlob(_messages(header, contents[digest]), timeout=CALL_TIMEOUT_S)
    return str(started.upload_id)


def _messages(
    header: pb.UploadBlobRequest.Header, content: Path | bytes
) -> Iterator[pb.UploadBlobRequest]:
    yield pb.UploadBlobRequest(header=header)
    if isinstance(content, bytes):
        yield pb.UploadBlobRequest(content=content)
        return
    with content.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield pb.UploadBlobRequest(content=piece)
