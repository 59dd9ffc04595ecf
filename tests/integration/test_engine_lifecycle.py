"""Start and stop of a real engine: refusals, readiness, drain, what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.channel import insecure_channel
from loraplex.status import from_rpc_error
from tests.support.engine_stack import ROOT, Stack, error_of, wait_gone
from tests.support.tiny_model import TINY_NAME, write_tiny_model
from tests.support.waiting import eventually

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A registry with the base model; tests start engines of their own at it."""
    with Stack(tmp_path_factory.mktemp("lifecycle")) as stack:
        stack.start_registry()
        stack.add_base_model()
        yield stack


@pytest.fixture(scope="module")
def quiet(registry: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """An engine for tests that only look at it."""
    with Stack(tmp_path_factory.mktemp("quiet")) as stack:
        stack.registry_address = registry.registry_address
        stack.start_engine("--enable-prefix-caching", "false", "--frontends", "2")
        yield stack


def run_engine(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine_svc.main", *args], cwd=ROOT, capture_output=True,
        text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_a_wrong_setting_stops_the_start_with_one_line() -> None:
    done = run_engine("--model", "x", "--max-loras", "none")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "--max-loras is 'none'; must be auto, or a whole number from 1" in done.stderr


def test_a_model_that_is_not_there_ends_the_engine_saying_so(registry: Stack) -> None:
    engine = registry.launch_engine("--model", "/nowhere/model")
    assert engine.process.wait(60) == 1
    (failed,) = engine.events("engine.failed")
    assert "/nowhere/model" in str(failed["message"])
    wait_gone(pids_of(engine.events("process.started")))


def test_folders_that_cannot_be_written_are_named(registry: Stack) -> None:
    file = registry.folder / "a-file"
    file.write_text("")
    done = registry.launch_engine("--run-dir", str(file / "run"))
    assert done.process.wait(30) == 2
    assert f"--run-dir is '{file / 'run'}'; must be a folder" in done.log.read_text()
    engine = registry.launch_engine("--disk-cache-dir", str(file / "cache"))
    assert engine.process.wait(60) == 1
    (failed,) = engine.events("engine.failed")
    assert f"--disk-cache-dir is '{file / 'cache'}'" in str(failed["message"])


def test_another_checkpoint_than_the_registered_one_is_refused(
    registry: Stack, tmp_path: Path
) -> None:
    other = write_tiny_model(tmp_path / TINY_NAME, seed=5)
    engine = registry.launch_engine("--model", str(other))
    assert engine.process.wait(60) == 1
    (failed,) = engine.events("engine.failed")
    assert "sha256:" in str(failed["message"])
    assert engine.out.read_text() == ""


def test_drain_finishes_open_streams_refuses_new_ones_and_leaves_nothing(registry: Stack) -> None:
    registry.start_engine("--enable-prefix-caching", "false", "--frontends", "2")
    engine = registry.engine
    assert engine is not None
    pids = [pid for role in ("core", "loader", "frontend") for pid in engine.children(role)]
    assert len(pids) == 4
    call = registry.stream(TINY_NAME, max_tokens=900)
    next(call)
    engine.process.send_signal(signal.SIGTERM)
    eventually(lambda: refuses(registry))
    tokens = [token for message in call for token in message.delta.token_ids]
    assert len(tokens) == 900
    assert engine.process.wait(20) == 0
    wait_gone(pids)
    assert list((registry.folder / "run").iterdir()) == []


def refuses(stack: Stack) -> bool:
    """A new call gets DRAINING, or the port is closed already."""
    with insecure_channel(stack.engine_address) as channel:
        stack._channel = channel
        try:
            stack.generate(TINY_NAME, max_tokens=1)
        except grpc.RpcError as error:
            return from_rpc_error(error).reason in ("DRAINING", "STARTING")
    return False


def test_streams_that_outlive_the_drain_end_with_a_status(registry: Stack) -> None:
    registry.start_engine("--drain-seconds", "0.2", "--enable-prefix-caching", "false")
    assert registry.engine is not None
    # twice as many as there are seats, and long: a fast machine does not finish them in the drain
    calls = [registry.stream(TINY_NAME, max_tokens=900) for _ in range(32)]
    for call in calls[:8]:
        next(call)
    assert registry.engine.terminate() == 0
    errors = [error for call in calls if (error := ending(call)) is not None]
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert all(from_rpc_error(error).reason == "DRAINING" for error in errors)


def test_a_second_interrupt_cuts_the_drain_short(registry: Stack) -> None:
    registry.start_engine("--drain-seconds", "60", "--enable-prefix-caching", "false")
    engine = registry.engine
    assert engine is not None
    pids = [pid for role in ("core", "loader", "frontend") for pid in engine.children(role)]
    (core,) = engine.children("core")
    call = registry.stream(TINY_NAME, max_tokens=900)
    next(call)
    os.kill(core, signal.SIGSTOP)  # the stream cannot end by itself
    engine.process.send_signal(signal.SIGINT)
    eventually(lambda: engine.events("engine.draining"))
    engine.process.send_signal(signal.SIGINT)
    assert engine.process.wait(20) == 0
    assert error_of(call).code() is grpc.StatusCode.UNAVAILABLE
    wait_gone(pids)


def ending(call: Iterator[object]) -> grpc.RpcError | None:
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error
    return None


def test_kv_pages_come_back_when_a_stream_is_cancelled(quiet: Stack) -> None:
    call = quiet.stream(TINY_NAME, prompt="x" * 500, max_tokens=500)
    next(call)
    assert eventually(lambda: quiet.state().memory.kv_bytes) > 0
    call.cancel()  # type: ignore[attr-defined]
    assert error_of(call).code() is grpc.StatusCode.CANCELLED
    eventually(lambda: quiet.state().memory.kv_bytes == 0)


def test_an_idle_engine_uses_next_to_no_cpu(quiet: Stack) -> None:
    assert quiet.engine is not None
    quiet.generate(TINY_NAME)
    (core,) = (psutil.Process(pid) for pid in quiet.engine.children("core"))
    before = core.cpu_times()
    assert core.cpu_percent(interval=1.0) < 5.0
    after = core.cpu_times()
    assert after.user - before.user < 0.1


def test_only_the_core_loads_torch_and_an_idle_engine_is_small(quiet: Stack) -> None:
    engine = quiet.engine
    assert engine is not None
    pids = {"supervisor": [engine.pid]}
    pids |= {role: engine.children(role) for role in ("core", "loader", "frontend")}
    with_torch = {
        role
        for role, of_role in pids.items()
        for pid in of_role
        if "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    }
    assert with_torch == {"core"}
    pss = sum(
        psutil.Process(pid).memory_full_info().pss for of_role in pids.values() for pid in of_role
    )
    # 700 MiB for the idle stack, of which a registry takes about 100; this is without weights
    assert pss - quiet.state().memory.weights_bytes < 600 * 2**20


def test_engine_waits_for_a_registry_that_is_not_there_yet(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.start_registry()
        assert stack.registry is not None
        assert stack.registry.terminate() == 0
        engine = stack.launch_engine()
        eventually(lambda: engine.events("registry.lost"), 60)
        (started,) = engine.events("engine.starting")
        with insecure_channel(str(started["address"])) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            answer = health.Check(request, timeout=30, wait_for_ready=True)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert engine.out.read_text() == ""
            stack.start_registry()
            stack.add_base_model()
            engine.started()
            assert health.Check(request, timeout=5).status == SERVING
        assert engine.terminate() == 0


def pids_of(events: list[dict[str, object]]) -> list[int]:
    return [int(str(event["pid"])) for event in events]
