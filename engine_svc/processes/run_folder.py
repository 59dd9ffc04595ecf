"""The folder of one start: metric files and the host cache's region; gone when the engine is."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "engine-"


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def host_region(self) -> Path:
        return self.path / "host_region"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def create(run_dir: Path) -> RunFolder:
    """A new folder of this process below `run_dir`; those of engines that were killed go."""
    run_dir.mkdir(parents=True, exist_ok=True)
    for left in run_dir.glob(_PREFIX + "*"):
        pid = left.name.removeprefix(_PREFIX)
        if pid.isdecimal() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            shutil.rmtree(left, ignore_errors=True)
    folder = RunFolder(run_dir / f"{_PREFIX}{os.getpid()}")
    folder.metrics.mkdir(parents=True)
    return folder


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
