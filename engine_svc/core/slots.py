"""Slots: the rows of the site table, and the pages that hold their adapters' bytes.

    free ──fill──▶ filling ──filled──▶ ready ──evict──▶ free (its pages retire with the last step)
                      └──── failed ────▶ free

A ready slot is idle unless its adapter holds a place; an idle one is wanted while its adapter
stands in the ring. The row itself is written by the first step that binds it, in stream order, so
only the pages have to wait for earlier steps.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from engine_svc.types import AdapterRef, WeightsReady


class SlotState(enum.Enum):
    FILLING = "filling"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Slot:
    """One adapter in the arena."""

    index: int
    ref: AdapterRef
    page_ids: tuple[int, ...]
    weights: WeightsReady
    #: when the adapter was asked for, and how long it took until it was here
    wanted_s: float
    #: when its copy began
    copied_from_s: float
    state: SlotState = SlotState.FILLING
    load_s: float = 0.0
    #: a step has written the row since the slot was filled
    bound: bool = False
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        self.digest = self.ref.digest


class SlotTable:
    """Slots by digest, and the idle ones by whether somebody waits for them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[str, Slot] = {}
        #: idle slots that nobody waits for, least recently used first, and the others
        self.unwanted: OrderedDict[str, Slot] = OrderedDict()
        self.wanted: dict[str, Slot] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def all(self) -> tuple[Slot, ...]:
        return tuple(self._slots.values())

    def get(self, digest: str) -> Slot | None:
        return self._slots.get(digest)

    def ready(self, digest: str) -> Slot | None:
        slot = self._slots.get(digest)
        return slot if slot is not None and slot.state is SlotState.READY else None

    def fill(
        self,
        ref: AdapterRef,
        page_ids: tuple[int, ...],
        weights: WeightsReady,
        wanted_s: float,
        now: float,
    ) -> Slot:
        """Give a row and pages to an adapter whose copy starts now."""
        assert ref.digest not in self._slots, f"{ref.digest} has a slot already"
        slot = Slot(self._free.pop(), ref, page_ids, weights, wanted_s, now)
        self._slots[ref.digest] = slot
        return slot

    def note(self, digest: str, has_turn: bool, is_wanted: bool) -> None:
        """The adapter's place or its demand for one came or went, or its slot was filled."""
        slot = self.ready(digest)
        if slot is None:
            return
        if has_turn or is_wanted:
            self.unwanted.pop(digest, None)
        elif digest not in self.unwanted:
            self.unwanted[digest] = slot
        if has_turn or not is_wanted:
            self.wanted.pop(digest, None)
        else:
            self.wanted[digest] = slot

    def remove(self, slot: Slot) -> None:
        """The row is free; the caller releases the pages."""
        del self._slots[slot.digest]
        self.unwanted.pop(slot.digest, None)
        self.wanted.pop(slot.digest, None)
        self._free.append(slot.index)

    def check_integrity(self) -> None:
        rows = [slot.index for slot in self._slots.values()] + self._free
        assert sorted(rows) == list(range(self.num_slots)), "a slot is lost or given twice"
        pages = [page for slot in self._slots.values() for page in slot.page_ids]
        assert len(pages) == len(set(pages)), "two slots share a page"
        assert all(digest == slot.digest for digest, slot in self._slots.items())
        for slot in (*self.unwanted.values(), *self.wanted.values()):
            assert self.ready(slot.digest) is slot, "a slot is idle that is not there"
        assert not self.unwanted.keys() & self.wanted.keys()
