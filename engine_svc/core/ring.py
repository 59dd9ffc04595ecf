"""The ring: adapters that could run if they had a place, in the order in which places come.

An adapter keeps the time at which its demand began, also while its weights load, and goes to the
tail when its turn ends. The ring costs nothing for adapters that nobody asks for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from engine_svc.core.lane import Lane


def _queued_at(lane: Lane) -> int:
    return lane.queued_at


class Ring:
    """Lanes in the order of `queued_at`."""

    def __init__(self) -> None:
        self._lanes: list[Lane] = []
        self.num_adapters = 0

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def first(self, count: int) -> list[Lane]:
        return list(islice(self._lanes, count))

    def position(self, lane: Lane) -> int:
        return bisect_left(self._lanes, lane.queued_at, key=_queued_at)

    def add(self, lane: Lane) -> None:
        assert not lane.in_ring
        insort(self._lanes, lane, key=_queued_at)
        lane.in_ring = True
        self.num_adapters += not lane.is_base

    def remove(self, lane: Lane) -> None:
        del self._lanes[self.position(lane)]
        lane.in_ring = False
        self.num_adapters -= not lane.is_base

    def check_integrity(self) -> None:
        order = [lane.queued_at for lane in self._lanes]
        assert order == sorted(set(order)), "the ring is out of order"
        assert all(lane.in_ring for lane in self._lanes)
        assert self.num_adapters == sum(not lane.is_base for lane in self._lanes)
