"""Registry and engine as real processes on this machine, and the commands that fill them.

Shared by demo.py, serve.py and the end-to-end test. Every process is the leader of a session of
its own, so that a Ctrl-C reaches this program alone, which then ends them in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
MODEL_NAME = "smollm2-135m-instruct"
MODEL_ALIAS = "HuggingFaceTB/SmolLM2-135M-Instruct"
MODEL_DIR = ROOT / ".loraplex" / "models" / MODEL_NAME
ADAPTERS_DIR = ROOT / "examples" / "adapters"
ADAPTERS = ("kefu-lora", "sql-lora", "contract-lora")
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
_LOG_TAIL_LINES = 15


class StackFailed(Exception):
    """A process or command failed; the message holds what it said last."""


class Service:
    """One process whose output goes to a log file, where it says when and where it listens."""

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        cwd: Path = ROOT,
    ) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *args], cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def address(self) -> str:
        """Wait for the line that says `server.started`. Raises: StackFailed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            exited = self.process.poll() is not None
            for line in self._log.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, AttributeError):
                    event = json.loads(line)
                    if event.get("event") == "server.started":
                        return str(event["address"])
            if exited:
                raise StackFailed(f"{self.name} ended before it listened:\n{self.tail()}")
            time.sleep(0.05)
        raise StackFailed(f"{self.name} did not listen in {START_TIMEOUT_S:.0f} s:\n{self.tail()}")

    def tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def terminate(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()

    def wait(self) -> int:
        """Exit status; what is left of the service after STOP_TIMEOUT_S is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Stack:
    """A registry and an engine; leaving the context ends both and what they started.

    Args: model, the folder of the base model, which is served under the folder's name.
    """

    def __init__(self, folder: Path, *, quiet: bool = False, model: Path = MODEL_DIR) -> None:
        self.folder = folder
        self.model = model
        self.env = service_environment()
        self._quiet = quiet
        self._services: list[Service] = []
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start_registry(self, *args: str) -> str:
        """Start it, wait, and let later commands find it; returns its address."""
        defaults = (
            "--database-url", f"sqlite:///{self.folder / 'registry.sqlite'}",
            "--blob-store", (self.folder / "blobs").as_uri(),
        )  # fmt: skip
        service = self._start("registry", "registry_svc.main", *defaults, *args)
        address = service.address()
        self.env["LORAPLEX_REGISTRY_ADDRESS"] = address
        return address

    def start_engine(self, *args: str) -> Service:
        """Start it without waiting: `address()` of the result does."""
        defaults = (
            "--model", str(self.model),
            "--served-model-name", self.model.name,
            "--registry-address", self.env["LORAPLEX_REGISTRY_ADDRESS"],
            "--blob-store", (self.folder / "blobs").as_uri(),
            "--disk-cache-dir", str(self.folder / "disk_cache"),
            "--run-dir", str(self.folder / "run"),
        )  # fmt: skip
        return self._start("engine", "engine_svc.main", *defaults, *args)

    def registryctl(self, *args: str) -> str:
        """Run the command and return what it printed. Raises: StackFailed."""
        self.say("$ registryctl " + " ".join(_shown(arg) for arg in args))
        done = subprocess.run(
            [sys.executable, "-m", "registry_svc.cli.main", *args], cwd=ROOT, env=self.env,
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode != 0:
            raise StackFailed(f"registryctl {args[0]} failed:\n{done.stdout}{done.stderr}")
        self.say(done.stdout.rstrip())
        return done.stdout

    def publish(self, names: Sequence[str] = ADAPTERS, folder: Path = ADAPTERS_DIR) -> None:
        """Register folders below `folder`. Adapters of a model of your own may call it otherwise
        than its folder is called: they are taken at your word."""
        confirmed = () if self.model == MODEL_DIR else ("--base-model-confirmed",)
        for name in names:
            self.registryctl(
                "register", name, str(folder / name), "--base-model", self.model.name, *confirmed
            )

    def add_base_model(self) -> None:
        alias = ("--alias", MODEL_ALIAS) if self.model == MODEL_DIR else ()
        self.registryctl("base-model", "add", self.model.name, "--from", str(self.model), *alias)

    def ended(self) -> Service | None:
        """A service that is no longer running."""
        return next((one for one in self._services if one.process.poll() is not None), None)

    def stop(self) -> None:
        """End the engine, then the registry; a second Ctrl-C does not cut this short."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for service in reversed(self._services):
                service.terminate()
            for service in reversed(self._services):
                service.wait()
            self._services.clear()
        finally:
            signal.signal(signal.SIGINT, before)

    def say(self, text: str) -> None:
        if not self._quiet and text:
            print(text, flush=True)

    def _start(self, name: str, *args: str) -> Service:
        service = Service(name, ("-m", *args), self.folder / f"{name}.log", self.env)
        self._services.append(service)
        return service


def convert_model() -> bool:
    """Write the demo model if it is not there; True when it was written now. Raises: StackFailed"""
    fresh = not (MODEL_DIR / "model.safetensors").exists()
    script = ROOT / "examples" / "demo_model" / "convert.py"
    done = subprocess.run(
        [sys.executable, str(script), str(MODEL_DIR)],
        cwd=ROOT, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode != 0:
        raise StackFailed(f"the demo model could not be written:\n{done.stdout}{done.stderr}")
    return fresh


def service_environment() -> dict[str, str]:
    """The caller's environment without settings of other loraplex services."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LORAPLEX_")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def _shown(arg: str) -> str:
    text = arg.removeprefix(f"{ROOT}{os.sep}")
    return f"'{text}'" if " " in text else text
