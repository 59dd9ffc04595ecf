"""registryctl's commands that work on the database and the blob store themselves."""

from __future__ import annotations

import argparse
import os

from loraplex.printing import print_fields, print_json
from registry_svc.database import Database
from registry_svc.migrating import current_revision, migrate, require_migrated
from registry_svc.server import open_store
from registry_svc.service.collector import Collector
from registry_svc.settings import Settings, read_settings


def run_migrate(args: argparse.Namespace) -> None:
    database = Database(_settings(args).database_url)
    before = current_revision(database)
    migrate(database)
    after = current_revision(database)
    if args.output == "json":
        print_json({"database": database.shown_url, "before": before, "after": after})
        return
    print_fields(
        {"database": database.shown_url, "before": before or "empty", "after": after or ""}
    )


def run_gc(args: argparse.Namespace) -> None:
    settings = _settings(args)
    database = Database(settings.database_url)
    require_migrated(database)
    done = Collector(database, open_store(settings)).collect()
    if args.output == "json":
        print_json({"blobs": done.blobs, "uploads": done.uploads, "partial": done.partial})
        return
    print_fields(
        {
            "blobs removed": done.blobs,
            "expired uploads removed": done.uploads,
            "broken uploads removed": done.partial,
        }
    )


def _settings(args: argparse.Namespace) -> Settings:
    """The server's own settings: the flags given here over its environment."""
    flags = []
    for name in ("database_url", "blob_store", "s3_endpoint_url"):
        value = getattr(args, name, None)
        if value:
            flags += ["--" + name.replace("_", "-"), value]
    return read_settings(flags, os.environ)
