"""One database, SQLite or PostgreSQL: connections, transactions, and their failures by name.

A write is one transaction, `BEGIN IMMEDIATE` on SQLite; a read sees one snapshot. A write that
loses a deadlock is run again from its start, so a use case must not act outside its transaction.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from loraplex.status import FieldInvalid, LoraplexError, ResourceExhausted, Unavailable
from registry_svc.repository.transaction import Transaction

T = TypeVar("T")
#: How often a write that the database aborted (deadlock, serialisation) is tried in all.
WRITE_ATTEMPTS = 4
BUSY_TIMEOUT_S = 10
_RETRYABLE = frozenset({"40001", "40P01"})
_WRITES = "loraplex_writes"


@dataclass(frozen=True, slots=True)
class Committed(Generic[T]):
    """What a use case returned, and the revision of its last event (0: it changed nothing)."""

    value: T
    revision: int


def utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class Database:
    """Runs use cases in transactions. `on_commit` hears each new revision after its commit."""

    def __init__(self, url: str, clock: Callable[[], dt.datetime] = utc_now) -> None:
        self._engine = create_database_engine(url)
        self._writing = self._engine.execution_options(**{_WRITES: True})
        self._reading = self._engine
        if self._engine.dialect.name == "postgresql":
            self._reading = self._engine.execution_options(isolation_level="REPEATABLE READ")
        self._clock = clock
        self.on_commit: Callable[[int], None] = lambda revision: None

    def read(self, use_case: Callable[[Transaction], T]) -> T:
        """Run a use case that changes nothing, on one snapshot."""
        try:
            with Session(self._reading) as session, session.begin():
                return use_case(Transaction(session, self._clock()))
        except SQLAlchemyError as error:
            raise self.failure(error) from error

    def write(self, use_case: Callable[[Transaction], T]) -> Committed[T]:
        """Run a use case, then give its events their revisions, then commit."""
        for attempt in range(1, WRITE_ATTEMPTS + 1):
            try:
                with Session(self._writing) as session, session.begin():
                    transaction = Transaction(session, self._clock())
                    value = use_case(transaction)
                    revision = transaction.assign_revisions()
            except SQLAlchemyError as error:
                if attempt < WRITE_ATTEMPTS and _sql_state(error) in _RETRYABLE:
                    continue
                raise self.failure(error) from error
            if revision:
                self.on_commit(revision)
            return Committed(value, revision)
        raise AssertionError("the last attempt returns or raises")

    def connect(self) -> Connection:
        """A bare connection, for migrations. Raises: Unavailable."""
        try:
            return self._writing.connect()
        except SQLAlchemyError as error:
            raise self.failure(error) from error

    def close(self) -> None:
        self._engine.dispose()

    @property
    def shown_url(self) -> str:
        """The URL without its password."""
        return self._engine.url.render_as_string(hide_password=True)

    def failure(self, error: SQLAlchemyError) -> LoraplexError | SQLAlchemyError:
        """A failure of the database as an error with a cause; our own mistakes stay as they are."""
        text = str(getattr(error, "orig", error)).strip().split("\n")[0]
        state = _sql_state(error)
        if "disk is full" in text or state == "53100":
            return ResourceExhausted(f"database {self.shown_url}: {text}", reason="DISK_FULL")
        lost = isinstance(error, PoolTimeout) or (
            isinstance(error, DBAPIError)
            and (error.connection_invalidated or type(error).__name__ == "OperationalError")
        )
        # SQLite's words for a file that is none of its own, or damaged
        lost |= "file is not a database" in text or "database disk image is malformed" in text
        if not lost:
            return error
        return Unavailable(
            f"database {self.shown_url}: {text}",
            reason="DATABASE_UNREACHABLE",
            retry_after_s=1.0,
        )


def create_database_engine(url: str) -> Engine:
    """An engine for `sqlite:////absolute/file` or `postgresql://…`.

    Raises: FieldInvalid: any other URL, or SQLite without a file.
    """
    limit = "sqlite:////absolute/file or postgresql://user@host/database"
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise FieldInvalid("database URL", "(not shown)", limit) from error
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return create_engine(
            parsed.set(drivername="postgresql+psycopg"),
            pool_pre_ping=True,
            pool_size=16,
            max_overflow=16,
            pool_timeout=10,
            connect_args={
                "connect_timeout": 5,
                "options": "-c lock_timeout=30s -c statement_timeout=60s -c timezone=UTC",
            },
        )
    if parsed.drivername != "sqlite" or parsed.database in (None, "", ":memory:"):
        raise FieldInvalid("database URL", parsed.render_as_string(hide_password=True), limit)
    return _sqlite_engine(parsed.database or "")


def _sqlite_engine(path: str) -> Engine:
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    try:
        engine = create_engine(
            f"sqlite:///{path}",
            pool_size=16,
            max_overflow=16,
            pool_timeout=10,
            connect_args={"timeout": BUSY_TIMEOUT_S, "isolation_level": None},
        )
    except NoSuchModuleError as error:
        raise FieldInvalid("database URL", path, "this Python has no sqlite3") from error

    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _: Any) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = NORMAL")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _sql_state(error: SQLAlchemyError) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlstate", "") or "")
