"""Statements that both databases know under one meaning but SQLAlchemy under two names."""

from __future__ import annotations

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from registry_svc.tables import Base


def insert_if_absent(session: Session, table: type[Base], values: dict[str, Any]) -> bool:
    """INSERT … ON CONFLICT DO NOTHING. Waits for a concurrent insert of the same key.

    Returns: whether the row is new.
    """
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    statement = dialect.insert(table).values(**values).on_conflict_do_nothing()
    result: Any = session.execute(statement)
    return bool(result.rowcount)
