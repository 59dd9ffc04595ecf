"""Three ways to serve three adapters on one machine, each as real engines on the loopback.

SeparateEngines   an engine for each adapter, which it loads from the registry
OneEngine         one engine that mixes all three
MergedEngines     an engine for each adapter, merged into a checkpoint that is a plain base
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from benchmarks.deployments.open_loop import Target, request_of
from benchmarks.shared.process_memory import tree_pss_bytes
from examples.demo_stack import (
    ADAPTERS,
    ADAPTERS_DIR,
    MODEL_ALIAS,
    MODEL_DIR,
    MODEL_NAME,
    ROOT,
    Service,
    Stack,
)
from loraplex.adapter_format import WEIGHTS_FILE
from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc

ENGINE_ARGS = (
    "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--max-loras", "4",
    "--max-model-len", "2048", "--drain-seconds", "3", "--device", "cpu",
)  # fmt: skip
#: seats of an engine with one adapter; one engine for all has those of all
SEATS = 16
UPDATE_TIMEOUT_S = 60.0
_POLL_S = 0.02


class Fleet(ABC):
    """Engines beside a registry that runs already; leaving the context ends them.

    `targets` says where each adapter is served, once entered.
    """

    name: ClassVar[str]

    def __init__(self, registry: Stack) -> None:
        self._registry = registry
        self._engines: dict[str, tuple[Stack, Service]] = {}
        self._channels = ExitStack()
        self.targets: dict[str, Target] = {}

    def __enter__(self) -> Fleet:
        try:
            self._start()
        except BaseException:
            self._stop_all()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_all()

    def pss_bytes(self) -> int:
        """Of the engines' processes; the registry not counted."""
        return sum(tree_pss_bytes(service.process.pid) for _, service in self._engines.values())

    @abstractmethod
    def update_s(self, adapter: str, folder: Path) -> float:
        """Seconds from new content in a folder to the first token that it gives."""

    @abstractmethod
    def _start(self) -> None:
        """Bring up the engines; `targets` is filled when it returns."""

    def _launch(self, key: str, *args: str, seats: int = SEATS) -> None:
        """Start an engine without waiting; later flags win."""
        stack = Stack(self._registry.folder / f"{type(self).__name__}-{key}", quiet=True)
        stack.env = dict(self._registry.env)
        blobs = (self._registry.folder / "blobs").as_uri()
        engine = stack.start_engine(
            *ENGINE_ARGS, "--blob-store", blobs, "--max-num-seqs", str(seats), *args
        )
        self._engines[key] = stack, engine

    def _connect(self, key: str, adapter: str, model: str) -> None:
        channel = insecure_channel(self._engines[key][1].address())
        self._channels.callback(channel.close)
        self.targets[adapter] = Target(channel, model)

    def _stop_all(self) -> None:
        self._channels.close()
        for stack, _ in self._engines.values():
            stack.stop()
        self._engines.clear()


class _Published(Fleet):
    """Adapters come from the registry, and new versions of them while the engine runs."""

    def update_s(self, adapter: str, folder: Path) -> float:
        target = self.targets[adapter]
        before = first_token(target).adapter.digest
        began = time.monotonic()
        self._registry.registryctl("register", adapter, str(folder), "--base-model", MODEL_NAME)
        while time.monotonic() < began + UPDATE_TIMEOUT_S:
            if first_token(target).adapter.digest != before:
                return time.monotonic() - began
            time.sleep(_POLL_S)
        raise TimeoutError(f"{adapter} is not updated after {UPDATE_TIMEOUT_S:g} s")


class SeparateEngines(_Published):
    name = "three engines, one adapter each"

    def _start(self) -> None:
        for adapter in ADAPTERS:
            self._launch(adapter)
        for adapter in ADAPTERS:
            self._connect(adapter, adapter, adapter)


class OneEngine(_Published):
    name = "one engine, three adapters"

    def _start(self) -> None:
        self._launch("all", seats=SEATS * len(ADAPTERS))
        for adapter in ADAPTERS:
            self._connect("all", adapter, adapter)


class MergedEngines(Fleet):
    name = "three merged checkpoints"

    def __init__(self, registry: Stack) -> None:
        super().__init__(registry)
        self._merged = 0

    def update_s(self, adapter: str, folder: Path) -> float:
        began = time.monotonic()
        model, checkpoint = self._merge(adapter, folder)
        self._engines.pop(adapter)[0].stop()
        self._serve(adapter, model, checkpoint)
        self._connect(adapter, adapter, model)
        first_token(self.targets[adapter])
        return time.monotonic() - began

    def _start(self) -> None:
        made = {adapter: self._merge(adapter, ADAPTERS_DIR / adapter) for adapter in ADAPTERS}
        for adapter, (model, checkpoint) in made.items():
            self._serve(adapter, model, checkpoint)
        for adapter, (model, _) in made.items():
            self._connect(adapter, adapter, model)

    def _merge(self, adapter: str, folder: Path) -> tuple[str, Path]:
        """Write a checkpoint and make it known as a base model of its own."""
        self._merged += 1
        model = f"merged-{adapter}-{self._merged}"
        checkpoint = self._registry.folder / model
        subprocess.run(
            [
                sys.executable, "-m", "engine_svc.cli.main", "merge", str(folder),
                "--model", str(MODEL_DIR), "--base-model-alias", MODEL_ALIAS,
                "--out", str(checkpoint),
            ],
            cwd=ROOT, env=self._registry.env, check=True, capture_output=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self._registry.registryctl("base-model", "add", model, "--from", str(checkpoint))
        return model, checkpoint

    def _serve(self, adapter: str, model: str, checkpoint: Path) -> None:
        self._launch(adapter, "--model", str(checkpoint), "--served-model-name", model)


def first_token(target: Target) -> engine_pb2.Started:
    """Ask for one token; what the engine said when it began, once the token is there."""
    stub = engine_pb2_grpc.EngineStub(target.channel)
    request = request_of(target.model, "Hello", 1, "")
    started = engine_pb2.Started()
    for response in stub.Generate(request, timeout=UPDATE_TIMEOUT_S):
        if response.HasField("started"):
            started = response.started
    return started


def changed_copy(adapter: Path, folder: Path, change: int) -> Path:
    """The same adapter but for the last bit of one bf16 number: another content."""
    shutil.copytree(adapter, folder)
    weights = folder / WEIGHTS_FILE
    content = bytearray(weights.read_bytes())
    content[-2 * change] ^= 1
    weights.write_bytes(content)
    return folder
