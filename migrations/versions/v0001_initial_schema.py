"""All tables of the first release.

Revision ID: 0001
Revises: nothing
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: None = None
depends_on: None = None


def _text(length: int) -> sa.String:
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


NAME, LONG_NAME, SHA256 = _text(128), _text(512), _text(64)


def upgrade() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", NAME, nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("subject", LONG_NAME, nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
    )
    op.create_index(op.f("ix_audit_log_subject"), "audit_log", ["subject"])
    op.create_index(op.f("ix_audit_log_time"), "audit_log", ["time"])

    op.create_table(
        "base_models",
        sa.Column("name", NAME, nullable=False),
        sa.Column("weights_digest", sa.String(length=71), nullable=False),
        sa.Column("config_json", sa.Text(), nullable=False),
        sa.Column("vocabulary_digest", sa.String(length=71), nullable=False),
        sa.Column("chat_template_digest", sa.String(length=71), nullable=False),
        sa.Column("eos_token_ids", sa.JSON(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_base_models")),
    )
    op.create_table(
        "blobs",
        sa.Column("sha256", SHA256, nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "state IN ('uploading','stored','deleting')", name=op.f("ck_blobs_state")
        ),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_blobs")),
    )
    op.create_table(
        "engines",
        sa.Column("id", sa.String(length=128), nullable=False),
        sa.Column("applied_revision", sa.BigInteger(), nullable=False),
        sa.Column("first_seen_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_engines")),
    )
    op.create_table(
        "events",
        sa.Column("revision", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("adapter", NAME, nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("revision", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_adapter_revision"), "events", ["adapter", "revision"])

    op.create_table(
        "idempotency",
        sa.Column("tenant", NAME, nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("method", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("outcome", sa.JSON(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "request_id", name=op.f("pk_idempotency")),
    )
    op.create_index(op.f("ix_idempotency_create_time"), "idempotency", ["create_time"])

    op.create_table(
        "names",
        sa.Column("name", LONG_NAME, nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("owner", NAME, nullable=False),
        sa.CheckConstraint(
            "kind IN ('adapter','alias','base_model','base_model_alias')",
            name=op.f("ck_names_kind"),
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_names")),
    )
    op.create_table(
        "revision",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_revision_one_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_revision")),
    )
    op.create_table(
        "tenants",
        sa.Column("name", NAME, nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.Column("max_queued_requests", sa.BigInteger(), nullable=False),
        sa.Column("max_queued_tokens", sa.BigInteger(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_tenants")),
    )
    op.create_table(
        "uploads",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("tenant", NAME, nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expire_time", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_uploads")),
    )
    op.create_index(op.f("ix_uploads_expire_time"), "uploads", ["expire_time"])

    op.create_table(
        "adapters",
        sa.Column("name", NAME, nullable=False),
        sa.Column("tenant", NAME, nullable=False),
        sa.Column("base_model", NAME, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("current_version", sa.BigInteger(), nullable=False),
        sa.Column("last_version", sa.BigInteger(), nullable=False),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("weight", sa.Float(precision=53), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("drain_deadline", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "state IN ('ACTIVE','DRAINING','DELETED')", name=op.f("ck_adapters_state")
        ),
        sa.CheckConstraint("weight > 0", name=op.f("ck_adapters_weight")),
        sa.ForeignKeyConstraint(
            ["base_model"], ["base_models.name"], name=op.f("fk_adapters_base_model_base_models")
        ),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.name"], name=op.f("fk_adapters_tenant_tenants")
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_adapters")),
    )
    op.create_index(op.f("ix_adapters_base_model"), "adapters", ["base_model"])
    op.create_index(op.f("ix_adapters_state"), "adapters", ["state"])
    op.create_index(op.f("ix_adapters_tenant"), "adapters", ["tenant"])

    op.create_table(
        "base_model_aliases",
        sa.Column("alias", LONG_NAME, nullable=False),
        sa.Column("base_model", NAME, nullable=False),
        sa.ForeignKeyConstraint(
            ["base_model"],
            ["base_models.name"],
            name=op.f("fk_base_model_aliases_base_model_base_models"),
        ),
        sa.PrimaryKeyConstraint("alias", name=op.f("pk_base_model_aliases")),
    )
    op.create_index(op.f("ix_base_model_aliases_base_model"), "base_model_aliases", ["base_model"])

    op.create_table(
        "residency",
        sa.Column("engine_id", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("tier", sa.String(length=16), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["engine_id"],
            ["engines.id"],
            name=op.f("fk_residency_engine_id_engines"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("engine_id", "digest", name=op.f("pk_residency")),
    )
    op.create_index(op.f("ix_residency_digest"), "residency", ["digest"])

    op.create_table(
        "tokens",
        sa.Column("id", sa.String(length=36), nullable=False),
        sa.Column("tenant", NAME, nullable=False),
        sa.Column("roles", sa.JSON(), nullable=False),
        sa.Column("secret_sha256", sa.String(length=64), nullable=False),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expire_time", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoke_time", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant"], ["tenants.name"], name=op.f("fk_tokens_tenant_tenants")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
    )
    op.create_index(op.f("ix_tokens_tenant"), "tokens", ["tenant"])

    op.create_table(
        "upload_files",
        sa.Column("upload_id", sa.String(length=36), nullable=False),
        sa.Column("name", LONG_NAME, nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", SHA256, nullable=False),
        sa.ForeignKeyConstraint(
            ["upload_id"],
            ["uploads.id"],
            name=op.f("fk_upload_files_upload_id_uploads"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("upload_id", "name", name=op.f("pk_upload_files")),
    )
    op.create_index(op.f("ix_upload_files_sha256"), "upload_files", ["sha256"])

    op.create_table(
        "adapter_versions",
        sa.Column("adapter", NAME, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("canonical_json", sa.LargeBinary(), nullable=False),
        sa.Column("base_model", NAME, nullable=False),
        sa.Column("max_rank", sa.Integer(), nullable=False),
        sa.Column("weights_bytes", sa.BigInteger(), nullable=False),
        sa.Column("parameter_count", sa.BigInteger(), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("retired", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter"], ["adapters.name"], name=op.f("fk_adapter_versions_adapter_adapters")
        ),
        sa.ForeignKeyConstraint(
            ["base_model"],
            ["base_models.name"],
            name=op.f("fk_adapter_versions_base_model_base_models"),
        ),
        sa.PrimaryKeyConstraint("adapter", "version", name=op.f("pk_adapter_versions")),
        sa.UniqueConstraint("adapter", "digest", name=op.f("uq_adapter_versions_adapter_digest")),
    )
    op.create_table(
        "aliases",
        sa.Column("alias", NAME, nullable=False),
        sa.Column("adapter", NAME, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter"], ["adapters.name"], name=op.f("fk_aliases_adapter_adapters")
        ),
        sa.PrimaryKeyConstraint("alias", name=op.f("pk_aliases")),
    )
    op.create_index(op.f("ix_aliases_adapter"), "aliases", ["adapter"])

    op.create_table(
        "adapter_version_files",
        sa.Column("adapter", NAME, nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("name", LONG_NAME, nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("sha256", SHA256, nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter", "version"],
            ["adapter_versions.adapter", "adapter_versions.version"],
            name=op.f("fk_adapter_version_files_adapter_version_adapter_versions"),
        ),
        sa.PrimaryKeyConstraint(
            "adapter", "version", "name", name=op.f("pk_adapter_version_files")
        ),
    )
    op.create_index(op.f("ix_adapter_version_files_sha256"), "adapter_version_files", ["sha256"])
    op.execute("INSERT INTO revision (id, value) VALUES (1, 0)")
    op.execute(
        "INSERT INTO tenants (name, weight, max_queued_requests, max_queued_tokens, generation)"
        " VALUES ('default', 1.0, 0, 0, 1)"
    )


def downgrade() -> None:
    op.drop_table("adapter_version_files")
    op.drop_table("aliases")
    op.drop_table("adapter_versions")
    op.drop_table("upload_files")
    op.drop_table("tokens")
    op.drop_table("residency")
    op.drop_table("base_model_aliases")
    op.drop_table("adapters")
    op.drop_table("uploads")
    op.drop_table("tenants")
    op.drop_table("revision")
    op.drop_table("names")
    op.drop_table("idempotency")
    op.drop_table("events")
    op.drop_table("engines")
    op.drop_table("blobs")
    op.drop_table("base_models")
    op.drop_table("audit_log")
