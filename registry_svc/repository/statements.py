"""Statements that both databases know under one meaning but SQLAlchemy under two names."""

from __future__ import annotations

from typing import Any

from sqlalchemy import inspect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from registry_svc.tables import Base


def insert_if_absent(session: Session, table: type[Base], values: dict[str, Any]) -> bool:
    """INSERT … ON CONFLICT DO NOTHING. Waits for a concurrent insert of the same key.

    Returns: whether the row is new.
    """
    dialect = postgresql if session.get_bind().dialect.name == "postgresql" else sqlite
    key = inspect(table).primary_key[0]
    statement = dialect.insert(table).values(**values).on_conflict_do_nothing().returning(key)
    return session.execute(statement).one_or_none() is not None
