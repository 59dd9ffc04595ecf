"""Runs migrations on the database named by the caller, or by LORAPLEX_REGISTRY_DATABASE_URL."""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from registry_svc.database import create_database_engine
from registry_svc.tables import Base


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        compare_type=True,
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


def main() -> None:
    given = context.config.attributes.get("connection")
    if given is not None:
        run(given)
        return
    url = os.environ.get("LORAPLEX_REGISTRY_DATABASE_URL")
    if not url:
        raise SystemExit("set LORAPLEX_REGISTRY_DATABASE_URL, or use `registryctl migrate`")
    with create_database_engine(url).begin() as connection:
        run(connection)


main()
