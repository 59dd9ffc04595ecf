"""What one start keeps besides its processes: metric files and the host cache's region.

Both are gone when the engine is; metric files of one that was killed go at the next start.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from engine_svc.settings import SettingInvalid

_PREFIX = "engine-"


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path
    #: opened by loader and core; outlives both, not this process
    host_region: Path
    _memory_fd: int

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._memory_fd >= 0:
            os.close(self._memory_fd)


def create(run_dir: Path) -> RunFolder:
    """A new folder of this process below `run_dir`; those of engines that were killed go.

    Raises: SettingInvalid: the folder cannot be written.
    """
    try:
        return _create(run_dir)
    except OSError as error:
        raise SettingInvalid(
            f"--run-dir is {str(run_dir)!r}; must be a folder that can be written: {error.strerror}"
        ) from None


def _create(run_dir: Path) -> RunFolder:
    run_dir.mkdir(parents=True, exist_ok=True)
    for left in run_dir.glob(_PREFIX + "*"):
        pid = left.name.removeprefix(_PREFIX)
        if pid.isdecimal() and (int(pid) == os.getpid() or not _is_alive(int(pid))):
            shutil.rmtree(left, ignore_errors=True)
    path = run_dir / f"{_PREFIX}{os.getpid()}"
    memory_fd, region = _host_region(path)
    folder = RunFolder(path, region, memory_fd)
    folder.metrics.mkdir(parents=True)
    return folder


def _host_region(path: Path) -> tuple[int, Path]:
    """Anonymous memory that other processes open by path, where the system has it: it is never
    written to a disk, and free as soon as nobody is left. Elsewhere a file."""
    if sys.platform == "linux":
        memory_fd = os.memfd_create("loraplex-host-region", os.MFD_CLOEXEC)
        return memory_fd, Path(f"/proc/{os.getpid()}/fd/{memory_fd}")
    return -1, path / "host_region"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
