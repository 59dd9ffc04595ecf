"""Page-locked memory that a device still reads is not written: rings of buffers, with events of a
device that is as late as it may be."""

from __future__ import annotations

import mmap
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from engine_svc.layout import smallest_page_size
from engine_svc.model.arena import Arena
from engine_svc.model.gpu import page_loads, staging
from engine_svc.model.gpu.page_loads import PageLoads
from engine_svc.model.gpu.staging import StagingRing
from tests.support.tiny_adapters import tiny_base

GPU = torch.device("cuda")


class LateEvent:
    """An event of a device that goes on only when somebody waits for it."""

    waits = 0

    def __init__(self) -> None:
        self.is_pending = False

    def record(self, stream: object = None) -> None:
        self.is_pending = True

    def synchronize(self) -> None:
        LateEvent.waits += self.is_pending
        self.is_pending = False


@pytest.fixture(autouse=True)
def late_device(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **kw: zeros(*args, **kw))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(page_loads, "new_stream", lambda device: None)
    for module in (staging, page_loads):
        monkeypatch.setattr(module, "new_event", lambda **kinds: LateEvent())
    LateEvent.waits = 0


@pytest.mark.parametrize("depth", [1, 3])
def test_a_buffer_is_filled_again_only_when_its_own_last_copy_is_done(depth: int) -> None:
    ring = StagingRing(depth, 4, GPU)
    target = torch.full((4,), -1, dtype=torch.int32)
    events: list[Any] = ring._copied
    for step in range(2 * depth + 1):
        index = ring.acquire()
        assert not events[index].is_pending
        assert index == step % depth
        ring.arrays[index][:] = step
        ring.copy_to(target, 3)
        assert target.tolist() == [step, step, step, -1]
        assert events[index].is_pending
        # nobody waited for copies that were made since
        assert LateEvent.waits == max(0, step + 1 - depth)


def loads_of(num_pages: int) -> tuple[PageLoads, Arena, np.ndarray]:
    base = tiny_base().spec
    arena = Arena(
        base, smallest_page_size(base, "float32"), "float32", 1 << 20, torch.device("cpu")
    )
    arena.bytes.zero_()
    images = np.random.default_rng(0).integers(1, 256, num_pages * arena.page_bytes, dtype=np.uint8)
    return PageLoads(arena, GPU), arena, images


@pytest.mark.parametrize("is_locked", [False, True])
def test_images_reach_their_pages_with_and_without_a_page_locked_region(is_locked: bool) -> None:
    loads, arena, images = loads_of(9)
    loads._locked = is_locked
    pages = [3, 4, 5, 12, 11, 0, 1, 7, 9]
    loads.write(pages, images)
    for page, image in zip(pages, images.reshape(9, -1), strict=True):
        assert np.array_equal(arena.page(page).numpy(), image)
    untouched = set(range(arena.num_pages)) - set(pages)
    assert not any(arena.page(page).any() for page in untouched)
    # four pages of our own: the fifth image waits for the first one's copy
    assert LateEvent.waits == (0 if is_locked else 5)
    loads.finish()
    assert LateEvent.waits == (1 if is_locked else 6)


def test_a_region_is_page_locked_beside_other_work_and_the_first_copy_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads, _, images = loads_of(2)
    may_end = threading.Event()
    calls: list[int] = []

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            may_end.wait(10)
            calls.append(size)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            calls.append(-1)
            return 0

    monkeypatch.setattr(page_loads, "_runtime", Runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    region = mmap.mmap(-1, 8192)
    loads.lock(region)
    assert not calls
    threading.Timer(0.05, may_end.set).start()
    loads.write([0, 1], images)
    assert calls == [8192]
    assert loads.wait_for_lock()
    loads.unlock()
    assert calls == [8192, -1]
