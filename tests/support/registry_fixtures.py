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
from sqlalchemy import insert

from loraplex.tenants import DEFAULT_TENANT
from registry_svc.database import Database
from registry_svc.migrating import migrate
from registry_svc.tables import Base, RevisionRow
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
def migrated_postgres(postgres_url: str) -> Iterator[str]:
    """A database for all tests, each of which finds it as the migrations left it."""
    with new_database(postgres_url) as url:
        database = Database(url)
        migrate(database)
        database.close()
        yield url


@pytest.fixture
def clean_postgres(migrated_postgres: str) -> str:
    database = Database(migrated_postgres)
    with database.connect() as connection, connection.begin():
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(table.delete())
        connection.execute(insert(RevisionRow).values(id=1, value=0))
    database.write(lambda tx: tx.tenants.ensure(DEFAULT_TENANT))
    database.close()
    return migrated_postgres


@pytest.fixture(params=BACKENDS)
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite+file":
            url, store, flags = sqlite_url(tmp_path), (tmp_path / "blobs").as_uri(), []
        else:
            url = request.getfixturevalue("clean_postgres")
            s3 = request.getfixturevalue("s3_store")
            stack.enter_context(environment(s3.environment))
            store = f"s3://{s3.bucket}/{tmp_path.name}"
            flags = ["--s3-endpoint-url", s3.endpoint_url]
        yield stack.enter_context(running_registry(tmp_path, url, store, *flags))


@pytest.fixture(params=DATABASES)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A migrated database of each kind, without rows."""
    if request.param == "sqlite":
        database = Database(sqlite_url(tmp_path))
        migrate(database)
    else:
        database = Database(request.getfixturevalue("clean_postgres"))
    yield database
    database.close()


@pytest.fixture(params=DATABASES)
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database of each kind without tables."""
    with contextlib.ExitStack() as stack:
        url = sqlite_url(tmp_path)
        if request.param == "postgres":
            url = stack.enter_context(new_database(request.getfixturevalue("postgres_url")))
        database = Database(url)
        stack.callback(database.close)
        yield database
