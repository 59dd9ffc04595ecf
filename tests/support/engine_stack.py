"""Registry and engine as real processes on loopback, with a tiny random model.

with Stack(tmp_path) as stack:
    stack.start_registry(); stack.publish("red", seed=1); stack.start_engine("--max-loras", "2")
    stack.generate("red", "hello")
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil

from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from registry_svc.cli.main import main as registryctl
from tests.support.tiny_model import TINY_NAME, write_tiny_adapter, write_tiny_model
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
CALL_TIMEOUT_S = 60.0


class Service:
    """One `python -m` process; its standard output and its log go to files."""

    def __init__(self, module: str, args: list[str], folder: Path, name: str) -> None:
        self.out, self.log = folder / f"{name}.out", folder / f"{name}.log"
        environ = {k: v for k, v in os.environ.items() if not k.startswith("LORAPLEX_")}
        environ["OMP_NUM_THREADS"] = "1"
        with self.out.open("wb") as out, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *args], cwd=ROOT, env=environ,
                stdin=subprocess.DEVNULL, stdout=out, stderr=log,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    def started(self) -> dict[str, str]:
        """The line that says `server.started`."""
        return eventually(self._started_line, START_TIMEOUT_S, every_s=0.02)

    def _started_line(self) -> dict[str, str] | None:
        for text in (self.out.read_text() + self.log.read_text()).splitlines():
            with contextlib.suppress(ValueError):
                line: dict[str, str] = json.loads(text)
                if line.get("event") == "server.started":
                    return line
        assert self.process.poll() is None, f"it ended:\n{self.log.read_text()[-3000:]}"
        return None

    def events(self, event: str) -> list[dict[str, object]]:
        """Log lines of that event so far."""
        found = []
        for text in self.log.read_text().splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if line.get("event") == event:
                    found.append(line)
        return found

    def children(self, role: str) -> list[int]:
        """Pids of the engine's running processes of one role."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    if child.cmdline()[2:4] == ["engine_svc.processes.child", role]:
                        found.append(child.pid)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)

    def terminate(self) -> int:
        """SIGTERM, then the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


@dataclass
class Answer:
    """One Generate stream, as far as it came."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    started: engine_pb2.Started | None = None
    finished: list[engine_pb2.Finished] = field(default_factory=list)
    summary: engine_pb2.Summary | None = None

    def add(self, message: engine_pb2.GenerateResponse) -> None:
        match message.WhichOneof("item"):
            case "started":
                self.started = message.started
            case "delta":
                self.text += message.delta.text
                self.token_ids.extend(message.delta.token_ids)
            case "finished":
                self.finished.append(message.finished)
            case "summary":
                self.summary = message.summary


class Stack:
    """Everything in `folder`; leaving the context ends all processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_tiny_model(folder / TINY_NAME)
        self.registry: Service | None = None
        self.engine: Service | None = None
        self.registry_address = "127.0.0.1:0"
        self.engine_address = ""
        self.metrics_address = ""
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        if self._channel is not None:
            self._channel.close()
        for service in (self.engine, self.registry):
            if service is not None and service.process.poll() is None:
                try:
                    service.terminate()
                except subprocess.TimeoutExpired:
                    service.kill()

    @property
    def blobs(self) -> Path:
        return self.folder / "blobs"

    # ---- registry

    def start_registry(self) -> None:
        """Start it, again at the address that it had."""
        args = [
            "--listen", self.registry_address, "--metrics-listen", "127.0.0.1:0",
            "--database-url", f"sqlite:///{self.folder / 'registry.sqlite'}",
            "--blob-store", f"file://{self.blobs}",
        ]  # fmt: skip
        self.registry = Service("registry_svc.main", args, self.folder, "registry")
        self.registry_address = self.registry.started()["address"]

    def registryctl(self, *args: str) -> str:
        """Run the command in this process; returns what it printed."""
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = registryctl([*args, "--address", self.registry_address])
        assert code == 0, f"registryctl {args[0]}: {output.getvalue()}"
        return output.getvalue()

    def add_base_model(self) -> None:
        self.registryctl("base-model", "add", TINY_NAME, "--from", str(self.model))

    def publish(self, name: str, seed: int, rank: int = 4) -> Path:
        """Write a random adapter and register it."""
        folder = write_tiny_adapter(self.folder / f"{name}-{seed}", seed, rank)
        self.registryctl("register", name, str(folder), "--base-model", TINY_NAME)
        return folder

    # ---- engine

    def launch_engine(self, *args: str) -> Service:
        """Start it without waiting."""
        self.engine = Service(
            "engine_svc.main", [*self.engine_args(), *args], self.folder, "engine"
        )
        return self.engine

    def start_engine(self, *args: str) -> None:
        line = self.launch_engine(*args).started()
        self.engine_address, self.metrics_address = line["address"], line["metrics"]
        self._channel = insecure_channel(self.engine_address)

    def engine_args(self) -> list[str]:
        return [
            "--model", str(self.model), "--listen", "127.0.0.1:0",
            "--metrics-listen", "127.0.0.1:0", "--registry-address", self.registry_address,
            "--blob-store", f"file://{self.blobs}",
            "--disk-cache-dir", str(self.folder / "disk_cache"),
            "--run-dir", str(self.folder / "run"),
            "--arena-bytes", "32MiB", "--host-cache-bytes", "16MiB", "--max-num-seqs", "16",
            "--max-num-batched-tokens", "128", "--drain-seconds", "10",
        ]  # fmt: skip

    @property
    def stub(self) -> engine_pb2_grpc.EngineStub:
        assert self._channel is not None, "start_engine first"
        return engine_pb2_grpc.EngineStub(self._channel)

    @property
    def channel(self) -> grpc.Channel:
        assert self._channel is not None, "start_engine first"
        return self._channel

    def stream(
        self, model: str, prompt: str = "once upon", max_tokens: int = 16, **options: float
    ) -> Iterator[engine_pb2.GenerateResponse]:
        """A greedy stream that no end token stops; it is also the grpc call."""
        timeout_s = options.pop("timeout_s", CALL_TIMEOUT_S)
        request = engine_pb2.GenerateRequest(
            model=model,
            prompt=prompt,
            sampling=engine_pb2.SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=max_tokens
            ),
        )
        call: Iterator[engine_pb2.GenerateResponse] = self.stub.Generate(request, timeout=timeout_s)
        return call

    def generate(self, model: str, prompt: str = "once upon", max_tokens: int = 16) -> Answer:
        answer = Answer()
        for message in self.stream(model, prompt, max_tokens):
            answer.add(message)
        return answer

    def state(self) -> engine_pb2.EngineState:
        return self.stub.GetEngineState(engine_pb2.GetEngineStateRequest(), timeout=10).state


def error_of(call: Iterator[engine_pb2.GenerateResponse]) -> grpc.RpcError:
    """The error that a stream ends with."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error
    raise AssertionError("the stream ended well")


def wait_gone(pids: list[int], timeout_s: float = 10.0) -> None:
    """Until no such process runs."""
    for pid in pids:
        eventually(lambda pid=pid: not is_running(pid), timeout_s)  # type: ignore[misc]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
