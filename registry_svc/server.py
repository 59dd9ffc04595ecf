"""The gRPC server: composition, background work, and an orderly end."""

from __future__ import annotations

import datetime as dt
import logging
import threading
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from loraplex.blobs import BlobStore, open_blob_store
from loraplex.channel import MAX_MESSAGE_BYTES
from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc
from loraplex.status import LoraplexError
from registry_svc.database import Database
from registry_svc.domain import Totals
from registry_svc.interceptor import CallInterceptor
from registry_svc.metrics import Metrics
from registry_svc.repository.transaction import Transaction
from registry_svc.service.adapters import Adapters
from registry_svc.service.base_models import BaseModels
from registry_svc.service.collector import PARTIAL_AGE_S, Collector
from registry_svc.service.publish import Publisher
from registry_svc.service.tenants import Tenants
from registry_svc.service.uploads import Uploads
from registry_svc.service.watch import WatchHub
from registry_svc.servicer import RegistryServicer, Services
from registry_svc.settings import Settings
from registry_svc.sources import Sources

LOG = logging.getLogger("registry_svc")
SERVICE = registry_pb2.DESCRIPTOR.services_by_name["AdapterRegistry"].full_name
#: How often drains that are over are looked for.
SWEEP_S = 0.5
#: Calls that may wait for a worker before gRPC refuses more.
WAITING_CALLS = 256


class PortTaken(OSError):
    """The address to listen on cannot be had."""


@dataclass(frozen=True, slots=True)
class Addresses:
    grpc: str
    metrics: str


class RegistryServer:
    """Everything of one registry process, given a database that is migrated."""

    def __init__(self, settings: Settings, database: Database, store: BlobStore) -> None:
        self._settings, self._database = settings, database
        self._hub = WatchHub(database, settings.max_watchers)
        database.on_commit = self._hub.notify
        self._adapters = Adapters(database, settings.adapter_drain_seconds)
        self._collector = Collector(database, store)
        self._metrics = Metrics(lambda: database.read(_totals), lambda: self._hub.watchers)
        self._health = health.HealthServicer()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._metrics_server: Any = None
        self._grpc = self._build(store)

    def start(self) -> Addresses:
        """Listen and serve. Raises: PortTaken, naming the address."""
        address = self._listen(self._settings.listen)
        metrics = self._serve_metrics()
        self._hub.start()
        self._grpc.start()
        self._run("sweep", SWEEP_S, self._adapters.finish_drains)
        if self._settings.gc_interval_seconds:
            self._run("gc", self._settings.gc_interval_seconds, self._collect)
        for name in ("", SERVICE):
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return Addresses(address, metrics)

    def stop(self) -> None:
        """Say NOT_SERVING, end the watches, let calls finish for drain_seconds, then close."""
        self._health.enter_graceful_shutdown()
        self._stop.set()
        self._hub.stop()
        self._grpc.stop(self._settings.drain_seconds).wait()
        for thread in self._threads:
            thread.join()
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()
        self._database.close()

    def _build(self, store: BlobStore) -> Any:
        settings = self._settings
        ttl = dt.timedelta(seconds=settings.upload_ttl_seconds)
        uploads = Uploads(self._database, store, settings.max_adapter_bytes, ttl)
        self._publisher = Publisher(
            database=self._database,
            store=store,
            uploads=uploads,
            sources=Sources(settings.source_prefix, settings.s3_endpoint_url),
            scratch_dir=Path(settings.scratch_dir),
            max_adapter_bytes=settings.max_adapter_bytes,
            max_lora_rank=settings.max_lora_rank,
            max_saved_bytes=settings.max_saved_bytes,
        )
        services = Services(
            base_models=BaseModels(self._database),
            adapters=self._adapters,
            uploads=uploads,
            publisher=self._publisher,
            tenants=Tenants(self._database),
            watch=self._hub,
        )
        threads = settings.workers + settings.max_watchers
        server = grpc.server(
            futures.ThreadPoolExecutor(threads, thread_name_prefix="rpc"),
            interceptors=(CallInterceptor(self._metrics),),
            maximum_concurrent_rpcs=threads + WAITING_CALLS,
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        registry_pb2_grpc.add_AdapterRegistryServicer_to_server(RegistryServicer(services), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    def _listen(self, listen: str) -> str:
        host = listen.rpartition(":")[0]
        try:
            port = self._grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise PortTaken(f"--listen {listen}: the address is taken or not ours") from error
        if not port:
            raise PortTaken(f"--listen {listen}: the address is taken or not ours")
        return f"{host}:{port}"

    def _serve_metrics(self) -> str:
        listen = self._settings.metrics_listen
        if not listen:
            return ""
        host, _, port = listen.rpartition(":")
        try:
            self._metrics_server, bound = self._metrics.serve(host.strip("[]"), int(port))
        except OSError as error:
            text = f"--metrics-listen {listen}: {error.strerror or error}"
            raise PortTaken(text) from error
        return f"{host}:{bound}"

    def _run(self, name: str, interval_s: float, work: Any) -> None:
        """Do `work` again and again; a failure is logged and tried again at the next turn."""

        def loop() -> None:
            while not self._stop.wait(interval_s):
                try:
                    work()
                except LoraplexError as error:
                    fields = {"work": name, "reason": error.reason, "message": error.message}
                    LOG.warning("background.failed", extra={"fields": fields})
                except Exception as error:
                    LOG.error("background.failed", exc_info=error, extra={"fields": {"work": name}})

        thread = threading.Thread(target=loop, name=name)
        thread.start()
        self._threads.append(thread)

    def _collect(self) -> None:
        done = self._collector.collect()
        scratch = self._publisher.discard_scratch(PARTIAL_AGE_S)
        fields = {
            "blobs": done.blobs,
            "uploads": done.uploads,
            "partial": done.partial,
            "scratch": scratch,
        }
        LOG.info("blobs.collected", extra={"fields": fields})


def open_store(settings: Settings) -> BlobStore:
    """The blob store, reachable and allowed. Raises: Unavailable."""
    store = open_blob_store(settings.blob_store, settings.s3_endpoint_url)
    store.check()
    return store


def _totals(tx: Transaction) -> Totals:
    return Totals(
        adapters=tx.adapters.count_by_state(),
        versions=tx.versions.count(),
        blob_bytes=tx.blobs.total_bytes(),
        revision=tx.events.revision(),
    )
