"""Our own registry and engine under a served trace: real processes on this machine's loopback."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serve.clients import Target
from benchmarks.serve.fleet import FleetFiles, adapter_names, publish
from benchmarks.shared.made_models import SHAPES, write_model_folder
from examples.demo_stack import ROOT, Service, Stack
from loraplex.base_model import parse_config

BASE_NAME = "bench-base"
LOOPBACK = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
DATABASE = "registry.sqlite"


@dataclass(frozen=True, slots=True)
class Serving:
    """Sizes of one engine and of what is published for it. Byte sizes as flags take them."""

    shape: str
    device: str
    adapters: int
    rank: int
    num_weights: int
    max_loras: int
    max_num_seqs: int
    max_num_batched_tokens: int
    context_tokens: int
    arena_bytes: int
    host_cache: str
    disk_cache: str
    frontends: int

    @property
    def config(self) -> Mapping[str, Any]:
        return SHAPES[self.shape]

    def engine_args(self) -> tuple[str, ...]:
        """Waits are what is measured, so nothing is refused for them."""
        return (
            *LOOPBACK, "--load-format", "dummy", "--device", self.device,
            "--served-model-name", BASE_NAME,
            "--max-loras", str(self.max_loras), "--max-num-seqs", str(self.max_num_seqs),
            "--max-num-batched-tokens", str(self.max_num_batched_tokens),
            "--max-model-len", str(self.context_tokens),
            "--arena-bytes", str(self.arena_bytes), "--host-cache-bytes", self.host_cache,
            "--disk-cache-bytes", self.disk_cache, "--frontends", str(self.frontends),
            "--max-queue-wait", "3600", "--drain-seconds", "1",
        )  # fmt: skip


class BenchStack:
    """A registry with a fleet of adapters, and engines that come and go."""

    def __init__(self, folder: Path, serving: Serving) -> None:
        self.folder, self._serving = folder, serving
        self.model = write_model_folder(folder / "model", serving.config)
        self.stack = Stack(folder / "stack", quiet=True)
        self.names = adapter_names(serving.adapters)

    def __enter__(self) -> BenchStack:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.stop()

    def fill(self, clients: int) -> float:
        """Start the registry and publish all adapters. Returns: seconds of publishing."""
        address = self.stack.start_registry(*LOOPBACK)
        self.stack.registryctl(
            "base-model", "add", BASE_NAME, "--from", str(self.model), "--dummy-weights"
        )
        return publish(address, self._files(), self.names, clients)

    def keep_database(self, target: Path) -> None:
        """A copy of the registry's database, for `restore`; journals and all."""
        with (
            contextlib.closing(sqlite3.connect(self.stack.folder / DATABASE)) as source,
            contextlib.closing(sqlite3.connect(target)) as copy,
        ):
            source.backup(copy)

    def restore(self, database: Path) -> None:
        """Start the registry on a copy of a database that `fill` made, with new blobs."""
        shutil.copy(database, self.stack.folder / DATABASE)
        self._files().put_weights((self.stack.folder / "blobs").as_uri())
        self.stack.start_registry(*LOOPBACK)

    @contextlib.contextmanager
    def engine(self, *args: str) -> Iterator[tuple[Target, float]]:
        """One that ends with the context: where it serves, and the seconds from its start to
        SERVING."""
        began = time.monotonic()
        engine: Service = self.stack.start_engine(
            "--model", str(self.model), *self._serving.engine_args(), *args
        )
        address = engine.address()
        took_s = time.monotonic() - began
        try:
            yield Target(address, BASE_NAME, int(self._serving.config["vocab_size"])), took_s
        finally:
            engine.terminate()
            engine.wait()

    def _files(self) -> FleetFiles:
        serving = self._serving
        spec = parse_config(dict(serving.config))
        folder = self.folder / "weights"
        return FleetFiles(folder, BASE_NAME, spec, serving.rank, serving.num_weights)


def starts_s(folder: Path, serving: Serving, count: int) -> list[float]:
    """Seconds from an engine's start to SERVING, one start after the other, with random shards that
    lie in the page cache. The first one hashes them, compiles kernels and captures graphs."""
    # brings torch, which no other part of this program needs
    from benchmarks.shared.made_checkpoints import write_checkpoint

    model = write_checkpoint(folder / "checkpoint", serving.config)
    found = []
    with Stack(folder / "starts", quiet=True) as stack:
        stack.start_registry(*LOOPBACK)
        stack.registryctl("base-model", "add", BASE_NAME, "--from", str(model))
        for _ in range(count):
            began = time.monotonic()
            engine = stack.start_engine(
                "--model", str(model), *serving.engine_args(), "--load-format", "auto"
            )
            engine.address()
            found.append(time.monotonic() - began)
            engine.terminate()
            engine.wait()
    return found


def in_process(
    model: Path, serving: Serving, streams: int, prompt: int, output: int, rounds: int
) -> Mapping[str, Any]:
    """What serve/in_process.py prints for the base alone. Raises: RuntimeError: it failed."""
    sizes = {
        "arena-bytes": serving.arena_bytes, "max-loras": serving.max_loras,
        "max-num-seqs": serving.max_num_seqs, "max-model-len": serving.context_tokens,
        "max-num-batched-tokens": serving.max_num_batched_tokens,
        "streams": streams, "prompt": prompt, "output": output, "rounds": rounds,
    }  # fmt: skip
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.serve.in_process", "--model", str(model)]
    done = subprocess.run(
        [*command, "--device", serving.device, *flags],
        cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"benchmarks.serve.in_process failed:\n{done.stdout}{done.stderr}")
    found: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def words(args: Sequence[str]) -> tuple[str, ...]:
    """--engine-arg's values, each "--flag value" or "--flag=value"."""
    return tuple(word for arg in args for word in arg.split())
