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
    """Run the migrations that the database lacks; two at once run one after the other.

    Raises: FailedPrecondition DATABASE_NOT_MIGRATED: a newer build migrated it.
    """
    config = alembic_config()
    with database.connect() as connection, connection.begin():
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
        found = MigrationContext.configure(connection).get_current_revision()
        if not _is_known(found):
            raise _not_migrated(database, found)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def unmigrate(database: Database) -> None:
    """Take every migration back; all rows are lost."""
    config = alembic_config()
    with database.connect() as connection, connection.begin():
        config.attributes["connection"] = connection
        command.downgrade(config, "base")


def require_migrated(database: Database) -> None:
    """Raises: FailedPrecondition DATABASE_NOT_MIGRATED, with what mends it."""
    found = current_revision(database)
    if found != head_revision():
        raise _not_migrated(database, found)


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


def _not_migrated(database: Database, found: str | None) -> FailedPrecondition:
    remedy = "run: registryctl migrate --database-url URL"
    if not _is_known(found):
        remedy = "a newer build migrated it: run that build, or a later one"
    wanted = head_revision()
    return FailedPrecondition(
        f"database {database.shown_url} is at migration {found or 'none'}, this build needs"
        f" {wanted}; {remedy}",
        reason="DATABASE_NOT_MIGRATED",
        metadata={"found": found or "", "needed": wanted},
    )


def _is_known(revision: str | None) -> bool:
    """Whether this build has that migration; one that it lacks is a newer build's."""
    scripts = ScriptDirectory.from_config(alembic_config()).walk_revisions()
    return revision is None or revision in {script.revision for script in scripts}
