"""The folder of one engine's Unix sockets, and the end of those that a kill left behind.

The supervisor holds a lock on a file inside for as long as it lives; the system drops it
with the process, however that ends. A folder whose lock is free belongs to nobody.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_svc.processes.socket import SOCKET_DIR_PREFIX, make_socket_dir

_OWNER = "owner"
#: A folder as new as that may still be between its making and its lock.
_YOUNG_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class SocketFolder:
    path: str
    _lock_fd: int

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def create() -> SocketFolder:
    """A new folder of this process; those beside it that a killed engine of this user left go."""
    path = make_socket_dir()
    fd = os.open(os.path.join(path, _OWNER), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    remove_left(Path(path).parent)
    return SocketFolder(path, fd)


def remove_left(parent: Path) -> None:
    """Remove this user's socket folders in `parent` whose owner has ended."""
    for folder in _own_folders(parent):
        try:
            fd = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(fd)


def _own_folders(parent: Path) -> Iterator[Path]:
    newest = time.time() - _YOUNG_SECONDS
    for folder in parent.glob(SOCKET_DIR_PREFIX + "*"):
        try:
            status = folder.lstat()
        except OSError:
            continue
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_own and status.st_mtime < newest:
            yield folder
