"""Copies packed adapters from the mapped host region into arena pages, on a thread of its own."""

from __future__ import annotations

import logging
import mmap
import queue
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import numpy as np

from engine_svc.failures import failure_of
from engine_svc.layout import RANK_BLOCK, AdapterLayout
from engine_svc.model.arena import Arena
from engine_svc.model.completion import SMALL_BYTES, Completion
from engine_svc.model.gpu.page_loads import PageLoads
from engine_svc.model.site_table import SlotRow, slot_row
from engine_svc.packed import PackedFileInvalid, decode_header
from engine_svc.types import Failure, SlotLoad
from loraplex.status import AdapterRefused, DataLoss, Internal

log = logging.getLogger(__name__)

Ended = tuple[SlotLoad, Failure | None]


class HostRegionReader:
    """The host cache region; opened at the first load, when it surely exists.

    Mapped read-only, but for a GPU: memory is page-locked only where it may be written.
    """

    def __init__(self, path: Path, loads: PageLoads | None) -> None:
        self._path, self._loads = path, loads
        self._map: mmap.mmap | None = None

    def span(self, offset: int, num_bytes: int) -> memoryview:
        """Raises: PackedFileInvalid when the span leaves the region; OSError."""
        region = self.open()
        if offset < 0 or offset + num_bytes > len(region):
            raise PackedFileInvalid(f"span {offset}+{num_bytes} leaves the host region")
        return memoryview(region)[offset : offset + num_bytes]

    def open(self) -> mmap.mmap:
        """Raises: OSError."""
        if self._map is None:
            mode, access = ("rb", mmap.ACCESS_READ)
            if self._loads is not None:
                mode, access = ("r+b", mmap.ACCESS_WRITE)
            with self._path.open(mode) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=access)
            if self._loads is not None:
                self._loads.lock(self._map)
        return self._map


class ArenaSlotWriter:
    """engine_svc.core.ports.SlotWriter over an arena.

    A load that ended well leaves its site table row behind until the plan that binds the slot takes
    it. A failed one leaves nothing. At most one load of a slot is outstanding.
    """

    def __init__(
        self,
        arena: Arena,
        layout: AdapterLayout,
        host_region: Path,
        max_rank: int,
        completion: Completion,
    ) -> None:
        self._arena = arena
        self._completion = completion
        self._layout = layout
        device = arena.bytes.device
        self._loads = PageLoads(arena, device) if device.type == "cuda" else None
        self._region = HostRegionReader(host_region, self._loads)
        self._max_rank = max_rank
        self._lock = threading.Lock()
        self._rows: dict[int, SlotRow] = {}
        self._jobs: queue.SimpleQueue[SlotLoad | Future[None] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, load: SlotLoad) -> None:
        self._begin()
        self._jobs.put(load)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="slot-writer", daemon=True)
            self._thread.start()

    def poll(self) -> tuple[Ended, ...]:
        ended: list[Ended] = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return tuple(ended)

    def lock_early(self) -> None:
        """On a GPU, begin to page-lock the region beside what else a start does, if it is there
        already."""
        if self._loads is not None:
            with suppress(OSError, ValueError):
                self._region.open()

    def warm_up(self) -> None:
        """Take the memory that completing an adapter needs; writes the arena's first pages. The
        region is page-locked when this returns, if it is there; else the first load locks it."""
        if self._loads is not None:
            self.lock_early()
            self._loads.wait_for_lock()
            ready: Future[None] = Future()
            self._begin()
            self._jobs.put(ready)
            ready.result()

    def _prepare(self, ready: Future[None]) -> None:
        """On the thread that completes adapters: libraries keep memory for each thread and
        stream."""
        assert self._loads is not None
        try:
            self._loads.reserve(self._completion.workspace_bytes, SMALL_BYTES)
            with self._loads.stream():
                self._completion.rehearse()
            self._loads.finish()
        except Exception as error:
            ready.set_exception(error)
        else:
            ready.set_result(None)

    def take_row(self, slot: int, digest: str) -> SlotRow:
        """The row of a load that ended well; a binding without one is our bug."""
        with self._lock:
            row = self._rows.pop(slot)
        assert row.digest == digest, (slot, row.digest, digest)
        return row

    def close(self) -> None:
        """Finish the loads that were started, then end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._loads is not None:
            self._loads.unlock()

    def _work(self) -> None:
        while (load := self._jobs.get()) is not None:
            if isinstance(load, Future):
                self._prepare(load)
                continue
            failure: Failure | None = None
            try:
                row = self._copy(load)
                with self._lock:
                    self._rows[load.slot] = row
            except PackedFileInvalid as error:
                failure = failure_of(DataLoss(f"adapter {load.digest} in the host cache: {error}"))
            except AdapterRefused as error:
                failure = failure_of(error)
            except Exception:
                # one adapter's load must never end the thread that loads all others
                log.exception("slot.copy_crashed", extra={"digest": load.digest, "slot": load.slot})
                failure = failure_of(
                    Internal(f"adapter {load.digest} was not copied; see the engine's log")
                )
            self._ended.put((load, failure))

    def _copy(self, load: SlotLoad) -> SlotRow:
        packed = self._region.span(load.span.offset, load.span.num_bytes)
        header = decode_header(packed, self._layout.digest)
        if header.digest != load.digest:
            raise PackedFileInvalid(f"it holds {header.digest}")
        if header.num_pages != len(load.page_ids):
            raise PackedFileInvalid(f"{header.num_pages} pages for {len(load.page_ids)} page ids")
        if header.rank_blocks * RANK_BLOCK > -(-self._max_rank // RANK_BLOCK) * RANK_BLOCK:
            raise PackedFileInvalid(f"{header.rank_blocks} rank blocks, limit {self._max_rank}")
        row = slot_row(header, load.page_ids, self._layout)
        images = np.frombuffer(packed, np.uint8)[header.image_offset :]
        page_bytes = self._arena.page_bytes
        if len(images) < header.num_pages * page_bytes:
            raise PackedFileInvalid(f"page images end after {len(images)} bytes")
        raw = np.array(header.arrays["raw"], np.int32)
        if self._loads is None:
            for index, page_id in enumerate(load.page_ids):
                image = images[index * page_bytes : (index + 1) * page_bytes]
                np.copyto(self._arena.page(page_id).numpy(), image)
            self._completion.complete(row, raw)
            return row
        try:
            self._loads.write(load.page_ids, images)
            with self._loads.stream():
                self._completion.complete(row, raw)
        finally:
            # also of a load that failed: its pages are given to others once that is told
            self._loads.finish()
        return row
