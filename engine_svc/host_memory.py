"""How much of the machine's memory the host cache takes when nobody says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

#: of the memory that the engine may use
_SHARE = 8
#: page-locking more would hold up a start on a GPU: about 1.4 GiB a second
_MOST_BYTES = 8 * 2**30
LEAST_BYTES = 64 * 2**20


def host_cache_bytes(asked: int, root: Path = Path("/")) -> int:
    """host_cache_bytes in effect. Args: asked, by the settings, 0: auto; root, where proc and sys
    are mounted."""
    return asked or max(LEAST_BYTES, min(_MOST_BYTES, memory_limit(root) // _SHARE))


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes of the machine, or of the control groups around this process if they allow less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _limit_files(root):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        # "max": none; version 1 says a number beyond any memory instead
        if text.isdecimal():
            found.append(int(text))
    return min(found)


def _limit_files(root: Path) -> Iterator[Path]:
    """Those that may hold a limit, of control groups of version 2 and 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if kinds == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in kinds.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # inside a container the path can be the host's: then only the mount itself is there
        inner = group.strip("/")
        while inner:
            yield mount / inner / name
            inner = inner.rpartition("/")[0]
        yield mount / name
