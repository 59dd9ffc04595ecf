"""The compose file's jobs and services, in its order and with its commands, as plain processes.

PostgreSQL and the S3 server are the tests' own; paths inside containers become folders of the test,
and the file's ports become free ones. Everything else is what the file says.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.demo_stack import ADAPTERS, MODEL_NAME, Service, service_environment
from tests.support.demo_model import ROOT
from tests.support.postgres import new_database
from tests.support.s3 import S3Server
from tests.support.waiting import eventually

pytestmark = [pytest.mark.postgres, pytest.mark.s3]
FROM_FIXTURES = {"pod", "postgres", "s3"}
OUR_PORTS = ("127.0.0.1:50051", "127.0.0.1:50052", "127.0.0.1:9400", "127.0.0.1:9401")
DATABASE_URL = "postgresql+psycopg://loraplex@127.0.0.1:5432/loraplex"


def in_order(services: dict[str, Any]) -> list[str]:
    """Names so that each comes after those that it depends on."""
    ordered: list[str] = []

    def visit(name: str) -> None:
        for needed in sorted(services[name].get("depends_on", {})):
            visit(needed)
        if name not in ordered:
            ordered.append(name)

    for name in sorted(services):
        visit(name)
    return ordered


class PlainStack:
    """Runs services of the file with its words replaced by this machine's."""

    def __init__(self, services: dict[str, Any], words: dict[str, str], folder: Path) -> None:
        self._services, self._words, self._folder = services, words, folder
        self.running: dict[str, Service] = {}

    def here(self, text: str) -> str:
        pattern = "|".join(map(re.escape, sorted(self._words, key=len, reverse=True)))
        return re.sub(pattern, lambda match: self._words[match[0]], text)

    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        service = self._services[name]
        settings = service.get("environment") or {}
        env = {key: self.here(value) for key, value in settings.items()}
        env = {**plain_environment(), **env}
        return [self.here(word) for word in service["command"]], env

    def run_job(self, name: str, *more: str, **given: str) -> str:
        command, env = self.command(name)
        done = subprocess.run(
            [sys.executable, *command, *more], cwd=ROOT, env={**env, **given},
            capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, name: str) -> None:
        command, env = self.command(name)
        log = self._folder / f"{name}.log"
        self.running[name] = Service(name, command, log, env)

    def wait_until_healthy(self, name: str) -> None:
        """By the check that the image declares."""
        text = (ROOT / "deploy" / f"{name}.Dockerfile").read_text()
        check = re.search(r"HEALTHCHECK .*\\\n\s*CMD (\[.*\])", text)
        assert check is not None
        _, script, address = json.loads(check[1])
        job = ROOT / script.removeprefix("/opt/loraplex/")
        command = [sys.executable, str(job), self.here(address)]
        env = plain_environment()

        service = self.running[name]
        said = ""

        def healthy_or_ended() -> bool:
            nonlocal said
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            said = done.stdout + done.stderr
            return done.returncode == 0 or service.process.poll() is not None

        try:
            eventually(healthy_or_ended, timeout_s=120.0, every_s=0.2)
        except AssertionError:
            raise AssertionError(f"{name}: {said}\n{service.tail()}") from None
        assert service.process.poll() is None, service.tail()


@pytest.fixture
def stack(
    postgres_url: str, s3_store: S3Server, demo_model_dir: Path, tmp_path: Path
) -> Iterator[PlainStack]:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "docker-compose"), "--profile", "client",
         "--env-file", os.devnull, "config", "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    services = json.loads(done.stdout)["services"]
    with new_database(postgres_url) as database:
        words = {
            DATABASE_URL: database.replace("postgresql://", "postgresql+psycopg://"),
            "http://127.0.0.1:8333": s3_store.endpoint_url,
            "/models/": f"{demo_model_dir.parent}/",
            "/secrets": str(tmp_path / "secrets"),
            "/cache": str(tmp_path / "cache"),
            "/run/loraplex": str(tmp_path / "run"),
            **{port: f"127.0.0.1:{number}" for port, number in zip(OUR_PORTS, free_ports(4))},  # noqa: B905
        }
        plain = PlainStack(services, words, tmp_path)
        yield plain
        for service in reversed(plain.running.values()):
            service.terminate()
        for service in reversed(plain.running.values()):
            service.wait()


def plain_environment() -> dict[str, str]:
    """In the images our packages are installed; here they are the clone's."""
    return {**service_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def test_the_jobs_of_the_compose_file_end_in_a_stack_that_answers(
    stack: PlainStack, s3_store: S3Server
) -> None:
    services = stack._services
    keys = {"S3_ACCESS_KEY": s3_store.access_key, "S3_SECRET_KEY": s3_store.secret_key}
    one_shot = {
        needed
        for service in services.values()
        for needed, how in service.get("depends_on", {}).items()
        if how["condition"] == "service_completed_successfully"
    }
    order = [name for name in in_order(services) if name not in FROM_FIXTURES]
    assert order[-1] == "engine" or order[-1] == "client"
    assert one_shot == {"secrets", "bucket", "migrate", "prepare", "publish"}
    for name in [name for name in order if name != "client"]:
        if name in one_shot:
            stack.run_job(name, **(keys if name == "secrets" else {}))
        else:
            stack.start(name)
            stack.wait_until_healthy(name)
    said = stack.run_job("client", "--max-tokens", "8")
    for adapter in ADAPTERS:
        assert re.search(rf"^{adapter} +v1 +sha256:", said, re.MULTILINE), said
    assert re.search(rf"^{MODEL_NAME} +base ", said, re.MULTILINE), said
    # the blobs lie in the bucket that the file names, and a second publish changes nothing
    listed = s3_store.client().list_objects_v2(Bucket="loraplex", Prefix="blobs/")
    assert listed["KeyCount"] >= 2 * len(ADAPTERS)
    assert "version 2" not in stack.run_job("publish")
