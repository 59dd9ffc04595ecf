"""Socket folders of engines that were killed go; those of living ones and of others stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_svc.processes import socket_folder

HOUR_AGO = time.time() - 3600
OWNER = """
import time
from engine_svc.processes import socket_folder
print(socket_folder.create().path, flush=True)
time.sleep(60)
"""


def left(parent: Path, name: str = "lpx-left", *, locked_file: str = "owner") -> Path:
    folder = parent / name
    folder.mkdir()
    (folder / locked_file).touch()
    (folder / "core.sock").touch()
    os.utime(folder, (HOUR_AGO, HOUR_AGO))
    return folder


def test_a_folder_goes_once_its_owner_was_killed_and_not_before() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        os.utime(folder, (HOUR_AGO, HOUR_AGO))
        socket_folder.remove_left(folder.parent)
        assert folder.is_dir(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert folder.is_dir()
    socket_folder.create().remove()
    assert not folder.exists()


def test_folders_that_are_new_or_not_an_engines_stay(tmp_path: Path) -> None:
    young = left(tmp_path, "lpx-young")
    os.utime(young)
    other = left(tmp_path, "lpx-pg-x", locked_file="data")
    (tmp_path / "lpx-link").symlink_to(left(tmp_path, "elsewhere"))
    gone = left(tmp_path)
    socket_folder.remove_left(tmp_path)
    assert not gone.exists()
    assert all((tmp_path / name).is_dir() for name in ("lpx-young", "elsewhere", other.name))


def test_folders_of_another_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    socket_folder.remove_left(tmp_path)
    assert (folder / "core.sock").exists()


def test_a_folder_that_is_removed_leaves_nothing() -> None:
    folder = socket_folder.create()
    assert Path(folder.path).is_dir()
    folder.remove()
    assert not Path(folder.path).exists()
