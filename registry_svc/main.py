"""`loraplex-registry`: read settings, check what it stands on, serve until SIGTERM."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence

from loraplex.status import LoraplexError
from registry_svc.database import Database
from registry_svc.logs import set_up_logs
from registry_svc.migrating import is_empty, migrate, require_migrated
from registry_svc.server import PortTaken, RegistryServer, open_store
from registry_svc.settings import SettingInvalid, Settings, read_settings

LOG = logging.getLogger("registry_svc")
EXIT_USAGE = 2
EXIT_CANNOT_START = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns: 0 after an orderly end, 1 when it cannot start, 2 for bad settings."""
    set_up_logs()
    try:
        settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    except SettingInvalid as error:
        return _refuse(str(error), "SETTING_INVALID", EXIT_USAGE)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        database = open_database(settings)
        server = RegistryServer(settings, database, open_store(settings))
        addresses = server.start()
    except LoraplexError as error:
        return _refuse(error.message, error.reason, EXIT_CANNOT_START)
    except PortTaken as error:
        return _refuse(str(error), "ADDRESS_TAKEN", EXIT_CANNOT_START)
    started = {
        "event": "server.started",
        "address": addresses.grpc,
        "metrics_address": addresses.metrics,
    }
    print(json.dumps(started), flush=True)
    stop.wait()
    LOG.info("server.draining", extra={"fields": {"seconds": settings.drain_seconds}})
    server.stop()
    LOG.info("server.stopped")
    return 0


def open_database(settings: Settings) -> Database:
    """The database at this build's migration. A new SQLite file is migrated by itself, everything
    else only by --migrate or `registryctl migrate`.

    Raises: Unavailable DATABASE_UNREACHABLE; FailedPrecondition DATABASE_NOT_MIGRATED.
    """
    database = Database(settings.database_url)
    embedded = settings.database_url.startswith("sqlite")
    if settings.migrate or (embedded and is_empty(database)):
        migrate(database)
    require_migrated(database)
    return database


def _refuse(message: str, reason: str, code: int) -> int:
    LOG.error("server.refused_to_start", extra={"fields": {"reason": reason, "message": message}})
    print(f"loraplex-registry: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
