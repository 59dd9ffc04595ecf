"""The real process: what stops its start, what it prints, how it ends; and registryctl."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex.channel import insecure_channel
from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc
from loraplex.status import from_rpc_error
from registry_svc.cli.main import main
from registry_svc.database import Database
from registry_svc.server import SERVICE
from tests.support.registry_service import blob_messages, file_messages, header_message
from tests.support.tiny_adapters import BASE_NAME, write_adapter, write_base_folder

pytest_plugins = ("tests.support.registry_fixtures",)

ROOT = Path(__file__).resolve().parents[2]
LISTEN = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")


def test_it_serves_metrics_health_and_reflection_and_sigterm_ends_watches(tmp_path: Path) -> None:
    with _running(tmp_path) as (process, started):
        with insecure_channel(started["address"]) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", SERVICE):
                answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = registry_pb2_grpc.AdapterRegistryStub(channel)
            stream = stub.WatchAdapters(pb.WatchAdaptersRequest(), timeout=60)
            assert next(stream).caught_up_revision == 0
            with pytest.raises(grpc.RpcError):
                stub.GetAdapter(pb.GetAdapterRequest(name="x"), timeout=30)
            metrics = _fetch(f"http://{started['metrics_address']}/metrics")
            call = 'loraplex_registry_rpcs_total{code="NOT_FOUND",method="GetAdapter"} 1.0'
            assert call in metrics
            assert "loraplex_registry_watchers 1.0" in metrics
            assert "loraplex_registry_revision 0.0" in metrics
            process.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError) as caught:
                next(stream)
            error = from_rpc_error(caught.value)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert process.wait(30) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    ended = [line for line in lines if line["event"] == "rpc.ended"]
    assert {"method", "code", "seconds", "peer", "time", "level"} <= ended[0].keys()
    assert [line["method"] for line in ended] == ["GetAdapter", "WatchAdapters"]


def test_a_registry_killed_in_mid_upload_comes_back_without_half_a_blob(tmp_path: Path) -> None:
    content = bytes(3_000_000)
    with _running(tmp_path) as (process, started), insecure_channel(started["address"]) as channel:
        stub = registry_pb2_grpc.AdapterRegistryStub(channel)
        request = pb.StartUploadRequest(files=file_messages({"a": content}))
        upload_id = stub.StartUpload(request, timeout=30).upload_id
        sent, hold = threading.Event(), threading.Event()

        def half() -> Iterator[Any]:
            yield header_message(upload_id, content)
            yield pb.UploadBlobRequest(content=content[:1_000_000])
            sent.set()
            hold.wait(60)

        call = stub.UploadBlob.future(half())
        assert sent.wait(30)
        process.kill()
        assert isinstance(call.exception(30), grpc.RpcError)
        hold.set()
        process.wait()
    assert not list((tmp_path / "blobs").glob("sha256/*/*"))
    with _running(tmp_path) as (_, started), insecure_channel(started["address"]) as channel:
        stub = registry_pb2_grpc.AdapterRegistryStub(channel)
        messages = blob_messages(upload_id, content, 500_000)
        assert stub.UploadBlob(messages, timeout=30).stored
        assert list(stub.StartUpload(request, timeout=30).missing_sha256) == []


def test_a_taken_port_stops_the_start_and_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("--listen", "--metrics-listen"):
            code, errors = _refused(tmp_path, *LISTEN, flag, address)
            assert code == 1
            assert f"{flag} {address}" in errors
    with _running(tmp_path) as (_, started):
        code, errors = _refused(tmp_path, "--listen", started["address"])
        assert (code, started["address"] in errors) == (1, True)


def test_a_database_without_migrations_or_reach_stops_the_start(
    tmp_path: Path, empty_database: Database
) -> None:
    url = empty_database._engine.url.render_as_string(hide_password=False)
    if url.startswith("sqlite"):
        with empty_database.connect() as connection, connection.begin():
            connection.exec_driver_sql("CREATE TABLE other (x INTEGER)")
    code, errors = _refused(tmp_path, *LISTEN, "--database-url", url)
    assert (code, "DATABASE_NOT_MIGRATED" in errors) == (1, True)
    assert "registryctl migrate" in errors
    done = _ctl("migrate", "--database-url", url, "--output", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["after"] == "0001"
    with _running(tmp_path, "--database-url", url):
        pass
    (tmp_path / "notes.txt").write_text("no database\n" * 100)
    code, errors = _refused(
        tmp_path, *LISTEN, "--database-url", f"sqlite:///{tmp_path / 'notes.txt'}"
    )
    assert (code, "file is not a database" in errors, "Traceback" in errors) == (1, True, False)
    dead = "postgresql://user:hunter2@127.0.0.1:9/x"
    code, errors = _refused(tmp_path, *LISTEN, "--database-url", dead)
    assert (code, "DATABASE_UNREACHABLE" in errors) == (1, True)
    assert "hunter2" not in errors


@pytest.mark.parametrize(
    ("flags", "variables", "key"),
    [
        ((), {"LORAPLEX_REGISTRY_LISEN": "x"}, "LORAPLEX_REGISTRY_LISEN"),
        ((), {"LORAPLEX_REGISTRY_WORKERS": "0"}, "LORAPLEX_REGISTRY_WORKERS"),
        (("--listen", "0.0.0.0:0"), {}, "--listen"),
        (("--listen", "127.0.0.1"), {}, "--listen"),
    ],
)
def test_a_bad_setting_stops_the_start_with_its_key(
    tmp_path: Path, flags: tuple[str, ...], variables: dict[str, str], key: str
) -> None:
    code, errors = _refused(tmp_path, *flags, variables=variables)
    assert (code, key in errors, "must be" in errors) == (2, True, True)


def test_registryctl_publishes_looks_and_retires(tmp_path: Path) -> None:
    base = write_base_folder(tmp_path / "base")
    one, two = write_adapter(tmp_path / "a", seed=1), write_adapter(tmp_path / "b", seed=2)
    bad = write_adapter(tmp_path / "bad", config={"target_modules": ["nonsense"]})
    with _running(tmp_path) as (_, started):
        address = ("--address", started["address"])

        def ctl(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
            done = _ctl_here(*words, *address)
            assert done.returncode == code, (words, done.stdout, done.stderr)
            return done

        ctl("base-model", "add", BASE_NAME, "--from", str(base))
        ctl("base-model", "alias", BASE_NAME, "org/tiny")
        listed = ctl("base-model", "list", "--output", "json").stdout
        assert json.loads(listed)[0]["aliases"] == ["org/tiny"]
        options = ("--base-model", BASE_NAME, "--label", "team=db", "--public")
        made = json.loads(ctl("register", "sql", str(one), *options, "--output", "json").stdout)
        assert (made["created"], made["adapter"]["labels"]) == (True, {"team": "db"})
        ctl("register", "sql", str(two), *options)
        assert "rollback" in ctl("register", "sql", str(one), *options).stdout
        refused = ctl("register", "bad", str(bad), *options, code=4)
        assert "TARGET_UNSUPPORTED" in refused.stderr
        ctl("register", "Bad/Name", str(one), *options, code=2)
        ctl("register", "x", str(tmp_path / "none"), *options, code=4)
        other = ctl("register", "x", "http://example.com/x", *options, code=2)
        assert "must be s3://bucket/folder or file:///absolute/folder" in other.stderr
        ctl("register", BASE_NAME, str(one), *options, code=5)
        ctl("show", "sql")
        assert "did you mean sql" in ctl("show", "sqll", code=3).stderr
        assert ctl("versions", "sql").stdout.count("sha256:") == 2
        ctl("rollback", "sql")
        ctl("alias", "prod", "sql", "--version", "2")
        found = json.loads(ctl("resolve", "prod", "--output", "json").stdout)
        assert found["version"]["version"] == "2"
        assert "adapter_changed  sql version 2 active" in ctl("watch", "--once").stdout
        ctl("update", "sql", "--weight", "nan", code=2)
        ctl("update", "sql", "--weight", "2", "--etag", "old", code=5)
        ctl("tenant", "update", "acme", "--weight", "3")
        assert json.loads(ctl("tenant", "show", "acme", "--output", "json").stdout)["weight"] == 3
        ctl("unregister", "sql", "--drain-seconds", "0.01")
        failed = ctl("show", "nothing", "--output", "json", code=3)
        assert json.loads(failed.stdout)["error"]["reason"] == "ADAPTER_NOT_FOUND"
    done = _ctl("list", "--address", "127.0.0.1:9", "--timeout", "5")
    assert (done.returncode, "REGISTRY_UNREACHABLE" in done.stderr) == (6, True)
    url, store = f"sqlite:///{tmp_path / 'registry.db'}", (tmp_path / "blobs").as_uri()
    swept = _ctl("gc", "--database-url", url, "--blob-store", store, "--output", "json")
    assert (swept.returncode, json.loads(swept.stdout).keys()) == (
        0,
        {"blobs", "uploads", "partial"},
    )


def test_verify_needs_no_server_and_prints_where_every_byte_lands(tmp_path: Path) -> None:
    base, adapter = write_base_folder(tmp_path / BASE_NAME), write_adapter(tmp_path / "a")
    (adapter / "optimizer.pt").write_bytes(b"x")
    done = _ctl("verify", str(adapter), "--base-model", str(base))
    assert done.returncode == 0, done.stderr
    assert "q_proj" in done.stdout
    assert "optimizer.pt" in done.stdout
    (adapter / "adapter_model.safetensors").unlink()
    done = _ctl("verify", str(adapter), "--base-model", str(base))
    assert (done.returncode, "WEIGHTS_INVALID" in done.stderr) == (4, True)


@contextlib.contextmanager
def _running(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A server process and the line that it printed when it was ready."""
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*_server(folder), *LISTEN, *flags], cwd=ROOT, env=_environment({}), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, (folder / "log").read_text()
        started = json.loads(line)
        assert started["event"] == "server.started"
        yield process, started
        if process.returncode is None:
            process.terminate()
            assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _refused(folder: Path, *flags: str, variables: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and errors of a server that must not start."""
    done = subprocess.run(
        [*_server(folder), *flags], cwd=ROOT, env=_environment(variables or {}), text=True,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def _server(folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "registry_svc.main", "--drain-seconds", "1",
        "--database-url", f"sqlite:///{folder / 'registry.db'}",
        "--blob-store", (folder / "blobs").as_uri(),
    ]  # fmt: skip


def _ctl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "registry_svc.cli.main", *words], cwd=ROOT, env=_environment({}),
        text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=120, check=False,
    )  # fmt: skip


def _ctl_here(*words: str) -> subprocess.CompletedProcess[str]:
    """The same without a process of its own."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main(words)
        except SystemExit as ended:
            # argparse refuses a word by itself
            code = int(str(ended.code))
    return subprocess.CompletedProcess(words, code, out.getvalue(), errors.getvalue())


def _environment(variables: dict[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("LORAPLEX_")}
    return {**kept, "http_proxy": "http://127.0.0.1:9", **variables}


def _fetch(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as answer:
        return str(answer.read().decode())
