"""The host cache's size when nobody says one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine_svc.adapters.folder_weights import bytes_for_folders
from engine_svc.host_memory import host_cache_bytes, memory_limit

GIB = 2**30
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, MACHINE),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}, MACHINE),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(GIB)}, GIB),
        # the tightest of the groups around this process
        (
            {
                "proc/self/cgroup": "0::/pod/engine",
                "sys/fs/cgroup/pod/memory.max": str(GIB // 2),
                "sys/fs/cgroup/pod/engine/memory.max": str(GIB),
            },
            GIB // 2,
        ),
        # a container sees its own group as the mount, under the host's path
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/1\n3:memory:/docker/1",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            },
            MACHINE,
        ),
    ],
)
def test_the_tightest_limit_of_machine_and_control_groups_counts(
    tmp_path: Path, files: dict[str, str], limit: int
) -> None:
    assert memory_limit(put(tmp_path, files)) == limit


def limited(root: Path, num_bytes: int) -> Path:
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": str(num_bytes)}
    return put(root, files)


def test_auto_is_an_eighth_within_bounds_and_a_number_is_taken(tmp_path: Path) -> None:
    assert host_cache_bytes(0, limited(tmp_path / "a", 2 * GIB)) == GIB // 4
    assert host_cache_bytes(0, limited(tmp_path / "b", GIB // 4)) == 64 << 20
    assert host_cache_bytes(0) <= 8 * GIB
    assert host_cache_bytes(12345, limited(tmp_path / "c", GIB)) == 12345


def test_folders_that_are_all_there_will_be_get_room_for_themselves(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "optimizer.pt").write_bytes(bytes(5000))
    assert bytes_for_folders(0, [tmp_path]) == (80 << 20) + 4000
    assert bytes_for_folders(0, [tmp_path] * 3) == (112 << 20) + 12000
    assert bytes_for_folders(0, []) == 64 << 20
    assert bytes_for_folders(7, [tmp_path]) == 7
