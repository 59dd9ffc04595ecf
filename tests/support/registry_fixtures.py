"""Fixtures of a running registry, and of databases, on each kind of database and blob store.

    sqlite + file      always
    postgres + s3      with real servers

A test module asks for them by `pytest_plugins = ("tests.support.registry_fixtures",)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from registry_svc.database import Database
from registry_svc.migrating import migrate
from tests.support.postgres import new_database
from tests.support.registry_service import Registry, environment, running_registry, sqlite_url

BACKENDS = (
    pytest.param("sqlite+file", id="sqlite+file"),
    pytest.param("postgres+s3", id="postgres+s3", marks=[pytest.mark.postgres, pytest.mark.s3]),
)
DATABASES = (
    pytest.param("sqlite", id="sqlite"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgres),
)


@pytest.fixture(scope="session")
def migrated_postgres(postgres_url: str) -> Iterator[tuple[str, str]]:
    """Arguments of new_database for a copy of a migrated database."""
    with new_database(postgres_url) as url:
        database = Database(url)
        migrate(database)
        database.close()
        yield postgres_url, url


@pytest.fixture(params=BACKENDS)
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite+file":
            url, store, flags = sqlite_url(tmp_path), (tmp_path / "blobs").as_uri(), []
        else:
            url = stack.enter_context(new_database(*request.getfixturevalue("migrated_postgres")))
            s3 = request.getfixturevalue("s3_store")
            stack.enter_context(environment(s3.environment))
            store = f"s3://{s3.bucket}/{tmp_path.name}"
            flags = ["--s3-endpoint-url", s3.endpoint_url]
        yield stack.enter_context(running_registry(tmp_path, url, store, *flags))


@pytest.fixture(params=DATABASES)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield sqlite_url(tmp_path)
        return
    with new_database(request.getfixturevalue("postgres_url")) as url:
        yield url
