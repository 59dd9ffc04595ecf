"""Memory of a tree of processes: the sum of PSS, in which shared pages count once."""

from __future__ import annotations

import os
import re
from pathlib import Path

MIB = 1 << 20


def started_pss_bytes() -> int:
    """Bytes of all living processes that descend from this one, itself not counted."""
    return sum(_pss_bytes(pid) for pid in _descendants(os.getpid()))


def tree_pss_bytes(root: int) -> int:
    """Bytes of a process and of all living ones that descend from it."""
    return sum(_pss_bytes(pid) for pid in (root, *_descendants(root)))


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            parent = _parent(folder)
            children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _parent(folder: Path) -> int:
    try:
        # after the name in brackets: state, then the parent's id
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0
