"""The registry's tables. Only registry_svc/repository reads or writes them.

names             every name that can be asked for, once: adapter, alias, base model, its aliases
base_models       ── base_model_aliases
tenants           ── adapters ── adapter_versions ── adapter_version_files
                              └─ aliases
uploads           ── upload_files          references to blobs until they expire
blobs             uploading → stored → deleting; a row exists before any byte does
revision, events  one row that counts; one event a revision
idempotency, tokens, engines, residency, audit_log
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[dt.datetime]):
    """An aware UTC time; SQLite, which has no time zones, keeps it without one."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: dt.datetime | None, dialect: Dialect) -> Any:
        return None if value is None else value.astimezone(dt.UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> dt.datetime | None:
        if value is None:
            return None
        aware = value if value.tzinfo else value.replace(tzinfo=dt.UTC)
        return aware.astimezone(dt.UTC)  # type: ignore[no-any-return]


def _text(length: int) -> String:
    """A string that both databases compare byte by byte, so that pages have one order."""
    return String(length).with_variant(String(length, collation="C"), "postgresql")


NAME = _text(128)
LONG_NAME = _text(512)
SHA256 = _text(64)
COUNTER = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)


class NameRow(Base):
    __tablename__ = "names"
    __table_args__ = (
        CheckConstraint("kind IN ('adapter','alias','base_model','base_model_alias')", name="kind"),
    )
    name: Mapped[str] = mapped_column(LONG_NAME, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16))
    owner: Mapped[str] = mapped_column(NAME)


class BaseModelRow(Base):
    __tablename__ = "base_models"
    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    weights_digest: Mapped[str] = mapped_column(String(71))
    config_json: Mapped[str] = mapped_column(Text)
    vocabulary_digest: Mapped[str] = mapped_column(String(71))
    chat_template_digest: Mapped[str] = mapped_column(String(71))
    eos_token_ids: Mapped[Any] = mapped_column(JSON)
    generation: Mapped[int] = mapped_column(BigInteger)
    create_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)


class BaseModelAliasRow(Base):
    __tablename__ = "base_model_aliases"
    __table_args__ = (Index(None, "base_model"),)
    alias: Mapped[str] = mapped_column(LONG_NAME, primary_key=True)
    base_model: Mapped[str] = mapped_column(ForeignKey("base_models.name"))


class TenantRow(Base):
    __tablename__ = "tenants"
    __table_args__ = (CheckConstraint("weight > 0", name="weight"),)
    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    weight: Mapped[float] = mapped_column(Float(53))
    max_queued_requests: Mapped[int] = mapped_column(BigInteger)
    max_queued_tokens: Mapped[int] = mapped_column(BigInteger)
    generation: Mapped[int] = mapped_column(BigInteger)


class AdapterRow(Base):
    __tablename__ = "adapters"
    __table_args__ = (
        CheckConstraint("state IN ('ACTIVE','DRAINING','DELETED')", name="state"),
        CheckConstraint("weight > 0", name="weight"),
        Index(None, "tenant"),
        Index(None, "base_model"),
        Index(None, "state"),
    )
    name: Mapped[str] = mapped_column(NAME, primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"))
    base_model: Mapped[str] = mapped_column(ForeignKey("base_models.name"))
    state: Mapped[str] = mapped_column(String(16))
    current_version: Mapped[int] = mapped_column(BigInteger)
    #: the largest number ever given; numbers are never reused
    last_version: Mapped[int] = mapped_column(BigInteger)
    public: Mapped[bool]
    labels: Mapped[Any] = mapped_column(JSON)
    description: Mapped[str] = mapped_column(Text)
    weight: Mapped[float] = mapped_column(Float(53))
    generation: Mapped[int] = mapped_column(BigInteger)
    create_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    update_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    drain_deadline: Mapped[dt.datetime | None] = mapped_column(UtcDateTime)


class AdapterVersionRow(Base):
    __tablename__ = "adapter_versions"
    __table_args__ = (UniqueConstraint("adapter", "digest"),)
    adapter: Mapped[str] = mapped_column(ForeignKey("adapters.name"), primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    digest: Mapped[str] = mapped_column(String(71))
    canonical_json: Mapped[bytes] = mapped_column(LargeBinary)
    base_model: Mapped[str] = mapped_column(ForeignKey("base_models.name"))
    max_rank: Mapped[int]
    weights_bytes: Mapped[int] = mapped_column(BigInteger)
    parameter_count: Mapped[int] = mapped_column(BigInteger)
    create_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    #: its adapter was unregistered: the version no longer protects its blobs
    retired: Mapped[bool]


class AdapterVersionFileRow(Base):
    __tablename__ = "adapter_version_files"
    __table_args__ = (
        ForeignKeyConstraint(
            ["adapter", "version"], ["adapter_versions.adapter", "adapter_versions.version"]
        ),
        Index(None, "sha256"),
    )
    adapter: Mapped[str] = mapped_column(NAME, primary_key=True)
    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(LONG_NAME, primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(SHA256)


class AliasRow(Base):
    __tablename__ = "aliases"
    __table_args__ = (Index(None, "adapter"),)
    alias: Mapped[str] = mapped_column(NAME, primary_key=True)
    adapter: Mapped[str] = mapped_column(ForeignKey("adapters.name"))
    #: 0: the adapter's current version
    version: Mapped[int] = mapped_column(BigInteger)


class BlobRow(Base):
    __tablename__ = "blobs"
    __table_args__ = (CheckConstraint("state IN ('uploading','stored','deleting')", name="state"),)
    sha256: Mapped[str] = mapped_column(SHA256, primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))
    create_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)


class UploadRow(Base):
    __tablename__ = "uploads"
    __table_args__ = (Index(None, "expire_time"),)
    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant: Mapped[str] = mapped_column(NAME)
    create_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    expire_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)


class UploadFileRow(Base):
    __tablename__ = "upload_files"
    __table_args__ = (Index(None, "sha256"),)
    upload_id: Mapped[str] = mapped_column(
        ForeignKey("uploads.id", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(LONG_NAME, primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(SHA256)


class RevisionRow(Base):
    __tablename__ = "revision"
    __table_args__ = (CheckConstraint("id = 1", name="one_row"),)
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[int] = mapped_column(BigInteger)


class EventRow(Base):
    __tablename__ = "events"
    __table_args__ = (Index(None, "adapter", "revision"),)
    revision: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    type: Mapped[str] = mapped_column(String(32))
    #: the adapter and version that the event shows; null for events of other kinds
    adapter: Mapped[str | None] = mapped_column(NAME)
    version: Mapped[int | None] = mapped_column(BigInteger)
    payload: Mapped[Any] = mapped_column(JSON)
    time: Mapped[dt.datetime] = mapped_column(UtcDateTime)


class IdempotencyRow(Base):
    __tablename__ = "idempotency"
    __table_args__ = (Index(None, "create_time"),)
    tenant: Mapped[str] = mapped_column(NAME, primary_key=True)
    request_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    method: Mapped[str] = mapped_column(String(64))
    #: SHA-256 of the request without its id
    fingerprint: Mapped[str] = mapped_column(String(64))
    outcome: Mapped[Any] = mapped_column(JSON)
    create_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)


class TokenRow(Base):
    __tablename__ = "tokens"
    __table_args__ = (Index(None, "tenant"),)
    id: Mapped[str] = mapped_column(String(36), primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.name"))
    roles: Mapped[Any] = mapped_column(JSON)
    secret_sha256: Mapped[str] = mapped_column(String(64))
    description: Mapped[str] = mapped_column(Text)
    create_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    expire_time: Mapped[dt.datetime | None] = mapped_column(UtcDateTime)
    revoke_time: Mapped[dt.datetime | None] = mapped_column(UtcDateTime)


class EngineRow(Base):
    __tablename__ = "engines"
    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    #: the last revision that the engine itself said it had applied
    applied_revision: Mapped[int] = mapped_column(BigInteger)
    first_seen_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    last_seen_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)


class ResidencyRow(Base):
    __tablename__ = "residency"
    __table_args__ = (Index(None, "digest"),)
    engine_id: Mapped[str] = mapped_column(
        ForeignKey("engines.id", ondelete="CASCADE"), primary_key=True
    )
    digest: Mapped[str] = mapped_column(String(71), primary_key=True)
    tier: Mapped[str] = mapped_column(String(16))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    pinned: Mapped[bool]
    update_time: Mapped[dt.datetime] = mapped_column(UtcDateTime)


class AuditRow(Base):
    __tablename__ = "audit_log"
    __table_args__ = (Index(None, "subject"), Index(None, "time"))
    id: Mapped[int] = mapped_column(COUNTER, primary_key=True)
    time: Mapped[dt.datetime] = mapped_column(UtcDateTime)
    tenant: Mapped[str] = mapped_column(NAME)
    action: Mapped[str] = mapped_column(String(64))
    subject: Mapped[str] = mapped_column(LONG_NAME)
    detail: Mapped[Any] = mapped_column(JSON)
