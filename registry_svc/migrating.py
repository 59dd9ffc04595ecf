"""Brings a database to this build's migration, or says that it is not there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import func, inspect, select

from loraplex.status import FailedPrecondition
from registry_svc.database import Database

#: Key of the advisory lock under which PostgreSQL databases are migrated.
MIGRATION_LOCK = 0x6C6F7261706C6578


def alembic_config() -> Config:
    """Alembic's configuration without a file: the scripts lie in the package `migrations`."""
    spec = find_spec("migrations")
    assert spec is not None, "the wheel ships migrations"
    assert spec.origin is not None, "migrations is a package"
    config = Config()
    config.set_main_option("script_location", str(Path(spec.origin).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def migrate(database: Database) -> None:
    """Run the migrations that the database lacks; two at once run one after the other."""
    config = alembic_config()
    with database.connect() as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def unmigrate(database: Database) -> None:
    """Take every migration back; all rows are lost."""
    config = alembic_config()
    with database.connect() as connection, connection.begin():
        config.attributes["connection"] = connection
        command.downgrade(config, "base")


def require_migrated(database: Database) -> None:
    """Raises: FailedPrecondition DATABASE_NOT_MIGRATED, with the command that mends it."""
    found, wanted = current_revision(database), head_revision()
    if found == wanted:
        return
    raise FailedPrecondition(
        f"database {database.shown_url} is at migration {found or 'none'}, this build needs"
        f" {wanted}; run: registryctl migrate --database-url URL",
        reason="DATABASE_NOT_MIGRATED",
        metadata={"found": found or "", "needed": wanted},
    )


def current_revision(database: Database) -> str | None:
    with database.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def head_revision() -> str:
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert head is not None
    return head


def is_empty(database: Database) -> bool:
    """Whether the database has no table at all."""
    with database.connect() as connection:
        return not inspect(connection).get_table_names()
