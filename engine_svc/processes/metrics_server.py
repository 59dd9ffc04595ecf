"""The engine's one /metrics: all processes' files together, read by the supervisor."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from engine_svc.settings import SettingInvalid, split_address


class MetricsServer:
    """Serves GET /metrics from the files in `folder` on a thread until the process ends.

    Raises: SettingInvalid: the port is taken.
    """

    def __init__(self, key: str, address: str, folder: Path) -> None:
        host, port = split_address(key, address)
        self._folder = str(folder)
        try:
            self._server = _Server((host, port), _handler(self._folder))
        except OSError as error:
            raise SettingInvalid(
                f"{key} is {address!r}; port {port} cannot be used: {error.strerror}"
            ) from None
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def forget(self, pid: int) -> None:
        """A process is gone: its gauges of live values go, what it counted stays."""
        mark_process_dead(pid, self._folder)  # type: ignore[no-untyped-call]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


def _handler(folder: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            registry = CollectorRegistry()
            try:
                MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
                body = generate_latest(registry)
            except (ValueError, FileNotFoundError) as error:
                # the files go before their folder does
                if isinstance(error, ValueError) and Path(folder).is_dir():
                    raise
                self.send_error(503, "the files of the metrics are being removed")
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not logged."""

    return Handler
