"""`make bench-registry`: how long a publish takes, and how soon everybody knows.

The check runs in a process of its own; the registry is a real process with its embedded database
and a folder of blobs, on this machine's loopback.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from google.protobuf.field_mask_pb2 import FieldMask

from benchmarks.registry.verification import verify_apart
from benchmarks.registry.watcher import Watcher
from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder, end_on_signals
from benchmarks.shared.made_adapters import BASE_8B, CONFIG_8B, RANK_OF_100_MB, write_adapter
from examples.demo_stack import Stack
from loraplex.registry.v1 import registry_pb2 as pb
from registry_svc.cli.client import Client

REGISTRY_ARGS = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
ROUNDS = 5
NUM_NAMES = 100
NUM_CALLS = 500
NUM_CLIENTS = 4
NUM_CHANGES = 100
TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.registry", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of it; rows go elsewhere")
    options = parser.parse_args()
    end_on_signals()
    recorder = Recorder("registry", results=PARTIAL if options.quick else RESULTS)
    share = 10 if options.quick else 1
    with tempfile.TemporaryDirectory(prefix="lpx-bench-") as scratch:
        folder = Path(scratch)
        measure_verification(recorder, folder, max(1, ROUNDS // share))
        with Stack(folder / "stack", quiet=True) as stack:
            address = stack.start_registry(*REGISTRY_ARGS)
            arguments = argparse.Namespace(address=address, timeout=TIMEOUT_S, tenant="")
            with Client(arguments) as client:
                client.call("RegisterBaseModel", pb.RegisterBaseModelRequest(base_model=_base()))
                measure_publish(recorder, client, folder, max(1, ROUNDS // share))
                names = fill(client, folder, NUM_NAMES // share)
                measure_resolve(recorder, client, names, NUM_CALLS // share)
                measure_watch(recorder, client, names, NUM_CHANGES // share)
    return recorder.finish()


def measure_verification(recorder: Recorder, folder: Path, rounds: int) -> None:
    adapter = write_adapter(folder / "checked", RANK_OF_100_MB)
    verify_apart(adapter)
    found = [verify_apart(adapter) for _ in range(rounds)]
    seconds = [one.wall_s for one in found]
    recorder.add("verification of a 100 MB adapter", seconds, "s", better="lower")
    cpu = [one.cpu_s for one in found]
    recorder.add("processor time of the verification", cpu, "s", better="lower")
    memory = [one.memory_bytes / one.size_bytes for one in found]
    recorder.add("memory of the verification / its size", memory, "×", better="lower")


def measure_publish(recorder: Recorder, client: Client, folder: Path, rounds: int) -> None:
    """100 MB of new content each time: hash, send, check, commit, and a watcher has the event."""
    sent, visible = [], []
    with Watcher(client.address) as watcher:
        for seed in range(1, rounds + 1):
            adapter = write_adapter(folder / "published", RANK_OF_100_MB, seed=seed)
            began = time.monotonic()
            upload = client.upload(adapter)
            sent.append(time.monotonic() - began)
            version = _register(client, "published", upload.upload_id).version
            watcher.wait_for(partial(_is_version, version))
            visible.append(time.monotonic() - began)
    recorder.add("upload of a 100 MB adapter", sent, "s", better="lower")
    recorder.add("100 MB adapter, upload to visible", visible, "s", better="lower")


def fill(client: Client, folder: Path, count: int) -> list[str]:
    """Names that share one small content."""
    adapter = write_adapter(folder / "small", 1)
    names = [f"small-{index}" for index in range(count)]
    for name in names:
        _register(client, name, client.upload(adapter).upload_id)
    return names


def measure_resolve(recorder: Recorder, client: Client, names: list[str], calls: int) -> None:
    def resolve(index: int) -> float:
        request = pb.ResolveAdapterRequest(reference=names[index % len(names)])
        began = time.monotonic()
        client.call("ResolveAdapter", request)
        return time.monotonic() - began

    alone = [1000 * resolve(index) for index in range(calls)]
    recorder.add("resolve a name", alone, "ms", better="lower")
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        began = time.monotonic()
        list(pool.map(resolve, range(calls)))
        rate = calls / (time.monotonic() - began)
    recorder.add(f"resolves, {NUM_CLIENTS} at a time", [rate], "1/s", better="higher")


def measure_watch(recorder: Recorder, client: Client, names: list[str], changes: int) -> None:
    """What a new engine waits for, and how late a change comes to one that watches."""
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        with Watcher(client.address):
            seconds.append(1000 * (time.monotonic() - began))
    recorder.add(f"watch from the beginning, {len(names)} names", seconds, "ms", better="lower")
    delays = []
    with Watcher(client.address) as watcher:
        for number in range(changes):
            text = f"change {number}"
            adapter = pb.Adapter(name=names[0], description=text)
            mask = FieldMask(paths=["description"])
            began = time.monotonic()
            client.call("UpdateAdapter", pb.UpdateAdapterRequest(adapter=adapter, update_mask=mask))
            watcher.wait_for(partial(_is_described, text))
            delays.append(1000 * (time.monotonic() - began))
    recorder.add("a change, call to watcher", delays, "ms", better="lower")


def _is_version(version: int, event: pb.Event) -> bool:
    return event.adapter.name == "published" and event.version.version == version


def _is_described(text: str, event: pb.Event) -> bool:
    return event.adapter.description == text


def _register(client: Client, name: str, upload_id: str) -> pb.AdapterVersion:
    request = pb.RegisterAdapterRequest(name=name, base_model=BASE_8B.name, upload_id=upload_id)
    done = client.call("RegisterAdapter", request)
    version: pb.AdapterVersion = done.version
    return version


def _base() -> pb.BaseModel:
    """Shapes are all that adapters are held against; nobody loads these weights."""
    return pb.BaseModel(
        name=BASE_8B.name,
        weights_digest="sha256:" + "8b" * 32,
        config_json=json.dumps(CONFIG_8B),
        eos_token_ids=BASE_8B.eos_token_ids,
    )


if __name__ == "__main__":
    sys.exit(main())
