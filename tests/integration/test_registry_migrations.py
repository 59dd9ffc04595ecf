"""Migrations: up, down, up again; and what they make is what the tables say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect

from loraplex.status import FailedPrecondition
from registry_svc.database import Database
from registry_svc.migrating import (
    current_revision,
    head_revision,
    is_empty,
    migrate,
    require_migrated,
    unmigrate,
)
from registry_svc.tables import Base

pytest_plugins = ("tests.support.registry_fixtures",)


def test_up_down_up_ends_where_the_tables_are(empty_database: Database) -> None:
    database = empty_database
    assert is_empty(database)
    with pytest.raises(FailedPrecondition) as caught:
        require_migrated(database)
    assert caught.value.reason == "DATABASE_NOT_MIGRATED"
    for _ in range(2):
        migrate(database)
        require_migrated(database)
        migrate(database)
        assert database.read(lambda tx: tx.events.revision()) == 0
        tenant = database.read(lambda tx: tx.tenants.get("default"))
        assert tenant is not None
        assert tenant.weight == 1
        with database.connect() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, Base.metadata) == []
        unmigrate(database)
        with database.connect() as connection:
            assert inspect(connection).get_table_names() == ["alembic_version"]
    assert current_revision(database) is None
    assert head_revision() == "0001"


def test_two_migrations_at_once_make_one_schema(empty_database: Database) -> None:
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(migrate, empty_database) for _ in range(3)]:
            done.result()
    require_migrated(empty_database)


def test_a_newer_database_stops_the_start(empty_database: Database) -> None:
    migrate(empty_database)
    with empty_database.connect() as connection, connection.begin():
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(FailedPrecondition) as caught:
        require_migrated(empty_database)
    assert caught.value.metadata == {"found": "9999", "needed": "0001"}
    assert "a newer build migrated it" in caught.value.message
    assert "registryctl migrate" not in caught.value.message
    with pytest.raises(FailedPrecondition, match="a newer build migrated it"):
        migrate(empty_database)


def test_every_constraint_has_a_name() -> None:
    for table in Base.metadata.tables.values():
        for constraint in (*table.constraints, *table.indexes):
            assert constraint.name, (table.name, constraint)
