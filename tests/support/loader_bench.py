"""A loader over a fake store and fake manifests, with a disk cache and a region of its own."""

from __future__ import annotations

import threading
import time

from engine_svc.adapters.disk_cache import DiskCache
from engine_svc.adapters.fetch import IN_MEMORY_BYTES, Fetcher
from engine_svc.adapters.host_region import HostRegion
from engine_svc.adapters.loader import Loader, RetryPolicy
from engine_svc.layout import adapter_layout, smallest_page_size
from engine_svc.packed import check_packed, decode_header
from engine_svc.types import AdapterRef
from loraplex.adapter_format import check_adapter, read_folder
from loraplex.status import NotFound, Unavailable
from tests.support.fake_blobs import FakeBlobStore
from tests.support.tiny_adapters import tiny_base, write_adapter

BASE = tiny_base()
LAYOUT = adapter_layout(BASE.spec, smallest_page_size(BASE.spec, "float32", 4), "float32")
WAIT_S = 10.0
RETRY = RetryPolicy(attempts=3, first_pause_s=0.005, remember_refusal_s=60.0)


class FakeManifests:
    def __init__(self):
        self.known = {}
        self.away = False

    def manifest(self, ref):
        if self.away:
            raise Unavailable("no registry", reason="REGISTRY_UNREACHABLE")
        if ref.digest not in self.known:
            raise NotFound(f"no version {ref.digest}", reason="VERSION_NOT_FOUND")
        return self.known[ref.digest]


class Bench:
    """A loader with everything around it, and adapters by name."""

    def __init__(
        self, tmp_path, names=("a", "b", "c"), *, region_bytes=1 << 20,
        in_memory_bytes=IN_MEMORY_BYTES, **options,
    ):  # fmt: skip
        self.tmp_path, self.options = tmp_path, options
        self.in_memory_bytes = in_memory_bytes
        self.store, self.manifests, self.refs = FakeBlobStore(), FakeManifests(), {}
        for seed, name in enumerate(names):
            files = read_folder(write_adapter(tmp_path / name, seed=seed)).files
            manifest = check_adapter(files, BASE).manifest
            self.store.add_folder(manifest, files)
            self.manifests.known[manifest.digest] = manifest
            self.refs[name] = AdapterRef(name, 1, manifest.digest)
        self.region = HostRegion.create(tmp_path / "host", region_bytes)
        self.answers = []
        self.loader = self.new_loader()

    def new_loader(self, max_rank=256):
        self.disk = DiskCache(self.tmp_path / "disk", 1 << 20)
        self.fetcher = Fetcher(
            self.store, self.manifests, self.disk, BASE, LAYOUT, max_rank, self.in_memory_bytes
        )
        self.woken = threading.Event()
        return Loader(
            self.fetcher, self.region, retry=RETRY, on_answer=self.woken.set, **self.options
        )

    def restart(self, **options):
        wait_until(self.kept)
        self.loader.stop()
        self.region.close()
        self.region = HostRegion.create(self.tmp_path / "host", self.region.num_bytes)
        self.loader = self.new_loader(**options)

    def want(self, name, rank=0):
        self.loader.want(self.refs[name], rank)

    def next(self, timeout_s=WAIT_S):
        """The next answer."""
        deadline = time.monotonic() + timeout_s
        while not self.answers:
            self.answers += self.loader.poll()
            if not self.answers:
                assert self.woken.wait(max(0.0, deadline - time.monotonic())), "no answer"
                self.woken.clear()
        return self.answers.pop(0)

    def load(self, name):
        self.want(name)
        answer = self.next()
        assert answer.digest == self.refs[name].digest
        return answer

    def kept(self):
        """Whether nothing is on its way to the disk cache any more."""
        with self.loader._changed:
            residency = self.loader._residency
            return not (residency.num_uncopied or residency.num_pinned)

    def header(self, ready):
        view = self.region.view(ready.span)
        header = decode_header(view, LAYOUT.digest)
        check_packed(view, header, LAYOUT)
        return header


def benches(tmp_path):
    """A fixture: a function that makes them; afterwards each is stopped and checked."""
    made = []

    def build(*args, **options):
        made.append(Bench(tmp_path, *args, **options))
        return made[-1]

    yield build
    for bench in made:
        bench.store.gate.set()
        bench.loader.stop()
        bench.loader.check_integrity()
        assert not any(thread.is_alive() for thread in bench.loader._threads)


def wait_until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
