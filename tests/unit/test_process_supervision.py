"""Pieces of the supervisor that need no child: the port, the backoff, the run folder."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine_svc.processes import run_folder
from engine_svc.processes.port import hold_port
from engine_svc.processes.supervised import (
    ENDS_WINDOW_SECONDS,
    LONGEST_BACKOFF_SECONDS,
    MAX_ENDS,
    Backoff,
    child_environ,
)
from engine_svc.processes.threads import quiet_threads
from engine_svc.settings import SettingInvalid


def sharing_listener(address: str) -> socket.socket:
    """What a frontend's gRPC server does."""
    host, port = address.rsplit(":", 1)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, int(port)))
    listener.listen()
    return listener


def test_a_port_held_twice_is_refused_with_its_number_before_anybody_listens() -> None:
    held = hold_port("--listen", "127.0.0.1:0")
    port = held.address.rsplit(":", 1)[1]
    with pytest.raises(SettingInvalid, match=rf"--listen is .*port {port} is taken"):
        hold_port("--listen", held.address)
    held.close()
    hold_port("--listen", held.address).close()


def test_frontends_share_the_held_port_and_get_all_connections() -> None:
    held = hold_port("--listen", "127.0.0.1:0")
    listeners = [sharing_listener(held.address) for _ in range(2)]
    host, port = held.address.rsplit(":", 1)
    for listener in listeners:
        listener.setblocking(False)
    for _ in range(20):
        socket.create_connection((host, int(port)), timeout=2).close()
    accepted = 0
    for listener in listeners:
        while True:
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                break
            accepted += 1
        listener.close()
    held.close()
    assert accepted == 20


def test_a_port_where_another_program_listens_is_refused() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingInvalid, match=f"port {port} is taken"):
            hold_port("--listen", f"127.0.0.1:{port}")


def test_backoff_grows_to_its_limit_and_then_gives_up() -> None:
    backoff = Backoff()
    delays = [backoff.ended(float(second)) for second in range(MAX_ENDS + 1)]
    assert delays[:3] == [0.1, 0.2, 0.4]
    assert delays[MAX_ENDS - 1] == LONGEST_BACKOFF_SECONDS
    assert delays[MAX_ENDS] is None


def test_a_child_that_never_gets_ready_is_given_up_sooner() -> None:
    backoff = Backoff()
    assert backoff.ended(0.0, was_ready=False) is not None
    assert backoff.ended(1.0, was_ready=False) is not None
    assert backoff.ended(2.0, was_ready=True) is not None
    assert backoff.ended(3.0, was_ready=False) is not None
    assert backoff.ended(4.0, was_ready=False) is not None
    assert backoff.ended(5.0, was_ready=False) is None


def test_backoff_forgets_ends_outside_its_window() -> None:
    backoff = Backoff()
    for _ in range(MAX_ENDS):
        backoff.ended(0.0)
    assert backoff.ended(ENDS_WINDOW_SECONDS + 1) == 0.1


def test_run_folder_removes_those_of_engines_that_were_killed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"engine-{dead.pid}"
    alive = tmp_path / f"engine-{os.getppid()}"
    for folder in (left, alive):
        (folder / "metrics").mkdir(parents=True)
    mine = run_folder.create(tmp_path)
    assert not left.exists()
    assert alive.exists()
    assert mine.metrics.is_dir()
    mine.remove()
    assert not mine.path.exists()


def test_children_get_no_settings_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_ENGINE_MAX_LORAS", "2")
    environ = child_environ("/run/metrics")
    assert "LORAPLEX_ENGINE_MAX_LORAS" not in environ
    assert environ["PROMETHEUS_MULTIPROC_DIR"] == "/run/metrics"


def test_torchs_threads_hardly_spin_unless_the_operator_says_how() -> None:
    assert quiet_threads({}) == {"GOMP_SPINCOUNT": "1000"}
    assert quiet_threads({"OMP_WAIT_POLICY": "ACTIVE"}) == {}


def test_the_supervisor_loads_neither_torch_nor_grpc_nor_numpy() -> None:
    code = (
        "import sys, engine_svc.processes.supervisor;"
        "print(sorted({'torch', 'grpc', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
