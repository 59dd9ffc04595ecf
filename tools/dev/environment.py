"""The virtual environment of the clone: made once, kept while its stamp matches."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.dev.checks import Unfit, check_machine, explain_pip_failure, has_nvidia_gpu
from tools.dev.plan import (
    PACKAGE_SETS,
    InstallStep,
    PackageSet,
    constraints_text,
    install_steps,
    probe_args,
    stamp,
)

#: pip's lines that a reader waits for; the log has the rest
_SHOWN = ("Downloading", "Processing", "Building", "Installing", "Successfully")


@dataclass(frozen=True, slots=True)
class Environment:
    """A clone and its virtual environment."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def runtime(self) -> Path:
        return self.root / ".loraplex"

    @property
    def log(self) -> Path:
        return self.runtime / "setup.log"

    def ensure(self, packages: PackageSet, *, any_arch: bool = False) -> None:
        """Leave an environment that holds `packages`; costs nothing when it does already.

        Raises: Unfit.
        """
        has_gpu = has_nvidia_gpu()
        wanted = {name: self._stamp(candidate, has_gpu) for name, candidate in PACKAGE_SETS.items()}
        if self._is_ready(packages, wanted):
            return
        self.runtime.mkdir(exist_ok=True)
        with locked(self.runtime / "setup.lock"):
            if self._is_ready(packages, wanted):
                return
            check_machine(packages, self.root, any_arch=any_arch)
            self._install(packages, has_gpu)
            self._stamp_file(packages).write_text(wanted[packages.name])

    def _is_ready(self, packages: PackageSet, wanted: dict[str, str]) -> bool:
        return any(
            candidate.covers(packages) and self._read_stamp(candidate) == wanted[name]
            for name, candidate in PACKAGE_SETS.items()
        )

    def _stamp_file(self, packages: PackageSet) -> Path:
        return self.folder / f"loraplex-{packages.name}.stamp"

    def _read_stamp(self, packages: PackageSet) -> str:
        try:
            return self._stamp_file(packages).read_text()
        except OSError:
            return ""

    def _stamp(self, packages: PackageSet, has_gpu: bool) -> str:
        return stamp(
            packages,
            pyproject=(self.root / "pyproject.toml").read_bytes(),
            constraints=(self.root / "constraints-cpu.txt").read_bytes(),
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            root=str(self.root),
            has_gpu=has_gpu,
        )

    def _install(self, packages: PackageSet, has_gpu: bool) -> None:
        started = time.monotonic()
        _say(f"Setting up {self.folder} (once; full log: {self.log})")
        self.log.write_text("")
        self._make_folder()
        constraints = self.folder / "constraints.txt"
        text = (self.root / "constraints-cpu.txt").read_text()
        constraints.write_text(constraints_text(text, has_gpu=has_gpu))
        in_indexes = not has_gpu and self._pip(probe_args(), None) == 0
        steps = install_steps(
            packages,
            constraints=constraints,
            has_gpu=has_gpu,
            cpu_torch_in_indexes=in_indexes,
        )
        for number, step in enumerate(steps, start=1):
            _say(f"[{number}/{len(steps)}] {step.title}")
            logged = self.log.stat().st_size
            if self._pip(step.args, step) != 0:
                said = self.log.read_bytes()[logged:].decode(errors="replace")
                raise explain_pip_failure(said, self.log)
        _say(f"Set-up took {time.monotonic() - started:.0f} s")

    def _make_folder(self) -> None:
        """Make the environment, or keep the one whose Python still runs and has our version."""
        probe = f"import sys, pip; sys.exit(sys.version_info[:2] != {sys.version_info[:2]!r})"
        if self.python.exists() and _quiet([str(self.python), "-c", probe]) == 0:
            return
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(self.folder)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode != 0:
            self.log.write_text(made.stdout + made.stderr)
            if "ensurepip" in made.stdout + made.stderr:
                raise Unfit(
                    "this Python cannot make virtual environments;"
                    " run: apt-get install python3-venv"
                )
            raise Unfit(f"the virtual environment could not be made; run: tail '{self.log}'")

    def _pip(self, args: tuple[str, ...], step: InstallStep | None) -> int:
        """Run `pip install`; the log gets everything, the reader the lines of _SHOWN."""
        command = [
            str(self.python), "-m", "pip", "--disable-pip-version-check", "install",
            "--no-input", "--progress-bar", "off", *args,
        ]  # fmt: skip
        with (
            self.log.open("a") as log,
            subprocess.Popen(
                command, cwd=self.root, text=True, errors="replace", stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_pip_environment(),
            ) as process,
        ):  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if step is not None and line.lstrip().startswith(_SHOWN):
                    _say("      " + shortened(line))
        return process.returncode


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file; a second process says that it waits, and waits."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("Another dev.py sets this clone up; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip_environment() -> dict[str, str]:
    """The caller's environment without what would move the installation elsewhere."""
    dropped = ("PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PYTHONPATH", "PYTHONHOME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "PIP_ROOT_USER_ACTION": "ignore"}


def shortened(line: str) -> str:
    """A line of pip's without the folder of a wheel and without what asked for it."""
    verb, _, rest = line.strip().partition(" ")
    return f"{verb} {rest.split(' (from ')[0].rpartition('/')[2]}"[:100]


def _quiet(command: list[str]) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode


def _say(text: str) -> None:
    print(text, flush=True)
