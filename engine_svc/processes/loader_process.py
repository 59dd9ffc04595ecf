"""The loader's process: names from the registry to the frontends, weights from the store to the
core. The core and the frontends connect to its one socket.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

from engine_svc.adapters.disk_cache import DiskCache
from engine_svc.adapters.fetch import Fetcher
from engine_svc.adapters.host_region import HostRegion
from engine_svc.adapters.loader import Loader
from engine_svc.adapters.watch import RegistryStatus, RegistryWatch
from engine_svc.layout import adapter_layout
from engine_svc.messages import (
    ChildFailed,
    ChildReady,
    CoreHello,
    Drop,
    FrontendHello,
    SharesChanged,
    Want,
)
from engine_svc.names import NameMapUpdate
from engine_svc.observing import LoadMetrics
from engine_svc.processes.child import Child
from engine_svc.processes.names_feed import NamesFeed
from engine_svc.processes.socket import Channel, ChannelClosed, Outbox, serve
from engine_svc.processes.staleness import Staleness
from engine_svc.shares import Shares, may_change_shares, quota_of
from engine_svc.types import WeightsFailed, WeightsReady
from loraplex.base_folder import find_base_folder, read_base_folder
from loraplex.blobs import open_blob_store
from loraplex.status import FailedPrecondition

_MIN_FETCHES, _MAX_FETCHES = 2, 8


def run(child: Child) -> None:
    """Until the supervisor lets go. Raises: LoraplexError: base model folder, blob store's URL."""
    stopped = threading.Event()
    child.watch(lambda seconds: None, stopped.set)
    process = _LoaderProcess(child)
    path = Path(child.boot.socket_dir) / "loader"
    stop_serving = serve(str(path), child.boot.authkey, process.accepted)
    process.watch.start()
    stopped.wait()
    stop_serving()


class _LoaderProcess:
    def __init__(self, child: Child) -> None:
        self._child = child
        boot = self._boot = child.boot
        settings = boot.settings
        # first: a core on a GPU page-locks it while it warms up
        self._region = HostRegion.create(Path(boot.host_region_path), settings.host_cache_bytes)
        cache_dir = _writable(Path(settings.disk_cache_dir))
        self._base, _, weights_digest = read_base_folder(
            find_base_folder(settings.model),
            settings.base_model_name,
            digest_cache=cache_dir / "base_digests.json",
            dummy_weights=settings.load_format == "dummy",
        )
        self._store = open_blob_store(settings.blob_store_url, settings.s3_endpoint_url or None)
        self._feed = NamesFeed(
            quota_of(settings.tenant_max_queued_requests, settings.tenant_max_queued_tokens)
        )
        self._staleness = Staleness(settings.max_registry_staleness, self._stale)
        self._metrics = LoadMetrics(settings.max_adapter_series)
        self._disk = DiskCache(cache_dir, settings.disk_cache_bytes)
        self._loader: Loader | None = None
        self._answered = threading.Event()
        #: of wants that have no answer yet
        self._adapter_names: dict[str, str] = {}
        self._core: Outbox | None = None
        #: what the connected core has heard; it begins with nothing but defaults
        self._told_shares = Shares()
        self._core_lock = threading.Lock()
        self.watch = RegistryWatch(
            settings.registry_address,
            settings.base_model_name,
            weights_digest,
            engine_id=boot.engine_id,
            weights_note=_weights_note(settings.load_format),
            on_update=self._names_changed,
            on_status=self._registry_changed,
        )

    # ---- the registry's thread

    def _names_changed(self, update: NameMapUpdate) -> None:
        self._feed.apply(update)
        if may_change_shares(update):
            self._tell_shares()
        self._metrics.applied(update.revision)
        if update.snapshot and self._feed.open():
            self._child.log.info("names.completed", revision=update.revision)
            self._child.tell(ChildReady({"revision": update.revision}))

    def _tell_shares(self) -> None:
        """Only what differs from the last message is worth one."""
        shares = self._feed.shares()
        with self._core_lock:
            if self._core is not None and shares != self._told_shares:
                self._core.put(SharesChanged(shares))
                self._told_shares = shares

    def _registry_changed(self, status: RegistryStatus) -> None:
        problem = status.problem
        if problem is None:
            if status.connected:
                self._staleness.back()
            return
        self._staleness.lost(status.last_heard_s)
        self._child.log.warning(
            "registry.lost", reason=problem.reason, message=problem.message,
            revision=status.applied_revision,
        )  # fmt: skip
        if status.fatal and not self._feed.is_open:
            self._child.tell(ChildFailed(problem.message, fatal=True))

    def _stale(self, is_stale: bool) -> None:
        self._feed.set_stale(is_stale)
        if is_stale:
            self._child.log.error("names.stale", revision=self._feed.revision)
        else:
            self._child.log.info("names.fresh", revision=self._feed.revision)

    # ---- a thread for each connection

    def accepted(self, channel: Channel) -> None:
        try:
            hello = channel.receive()
            if isinstance(hello, CoreHello):
                self._serve_core(channel, hello)
            elif isinstance(hello, FrontendHello):
                self._serve_frontend(channel)
        except ChannelClosed:
            channel.close()

    def _serve_frontend(self, channel: Channel) -> None:
        outbox = Outbox(channel)
        self._feed.attach(outbox)
        try:
            channel.receive()  # a frontend says nothing more; this waits for its end
        finally:
            self._feed.detach(outbox)
            outbox.close()

    def _serve_core(self, channel: Channel, hello: CoreHello) -> None:
        with self._core_lock:
            loader = self._loader = self._loader or self._new_loader(hello)
            # a core that was killed may not have been noticed yet
            loader.forget_core()
            outbox = self._core = Outbox(channel)
            self._told_shares = Shares()
        self._tell_shares()
        try:
            while True:
                message = channel.receive()
                match message:
                    case Want(ref, rank):
                        self._adapter_names[ref.digest] = ref.name
                        loader.want(ref, rank)
                    case Drop(digest):
                        loader.drop(digest)
                    case WeightsReady():
                        loader.adopt(message)
        finally:
            with self._core_lock:
                if self._core is outbox:
                    self._core = None
                    loader.forget_core()
            outbox.close()

    def _new_loader(self, hello: CoreHello) -> Loader:
        """The first core says how adapters are packed; a later one of this engine says the same."""
        settings = self._boot.settings
        layout = adapter_layout(self._base.spec, hello.page_size, hello.dtype)
        fetcher = Fetcher(
            self._store, self.watch, self._disk, self._base, layout, settings.max_lora_rank
        )
        loader = Loader(
            fetcher, self._region, max_adapters=settings.max_cpu_loras, threads=_fetch_threads(),
            on_answer=self._answered.set,
        )  # fmt: skip
        threading.Thread(
            target=self._send_answers, args=(loader,), name="answers", daemon=True
        ).start()
        return loader

    def _send_answers(self, loader: Loader) -> None:
        while self._answered.wait():
            self._answered.clear()
            stats = loader.stats()
            self._metrics.cached("host", stats.host_bytes, stats.host_evictions)
            self._metrics.cached("disk", self._disk.num_bytes(), self._disk.evictions)
            with self._core_lock:
                for answer in loader.poll():
                    name = self._adapter_names.pop(answer.digest, "")
                    self._metrics.answered(name, answer)
                    if isinstance(answer, WeightsFailed):
                        failure = answer.failure
                        self._child.log.warning(
                            "adapter.load_failed", adapter=name, digest=answer.digest,
                            reason=failure.reason, message=failure.message,
                        )  # fmt: skip
                    if self._core is not None:
                        self._core.put(answer)


def _fetch_threads() -> int:
    """Reading, hashing and packing let go of the interpreter: two threads, or half of the cores."""
    return max(_MIN_FETCHES, min(_MAX_FETCHES, len(os.sched_getaffinity(0)) // 2))


def _weights_note(load_format: str) -> str:
    return " (random weights: --load-format dummy)" if load_format == "dummy" else ""


def _writable(folder: Path) -> Path:
    """Raises: FailedPrecondition: it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise FailedPrecondition(
            f"--disk-cache-dir is {str(folder)!r}; must be a folder that can be written: "
            f"{error.strerror}",
            reason="CONFIG_INVALID",
        ) from error
    return folder
