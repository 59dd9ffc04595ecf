"""Paused sequences that keep their pages, and who of them gives pages first: the newest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, KeysView

from engine_svc.core.sequence import Age, Sequence


class Paused:
    """By age, with a heap that forgets late: who has left is skipped at its top."""

    def __init__(self) -> None:
        self._by_age: dict[Age, Sequence] = {}
        self._newest: list[tuple[int, int]] = []
        #: ages in the heap
        self._listed: set[Age] = set()

    def ages(self) -> KeysView[Age]:
        return self._by_age.keys()

    def add(self, sequence: Sequence) -> None:
        self._by_age[sequence.age] = sequence
        self._list(sequence.age)

    def discard(self, sequence: Sequence) -> None:
        self._by_age.pop(sequence.age, None)

    def newest(self, may_take: Callable[[Sequence], bool]) -> Sequence | None:
        """The newest that may be taken."""
        spared: list[Age] = []
        found: Sequence | None = None
        while self._newest and found is None:
            order, choice = heapq.heappop(self._newest)
            age = (-order, -choice)
            self._listed.discard(age)
            sequence = self._by_age.get(age)
            if sequence is None:
                continue
            spared.append(age)
            if may_take(sequence):
                found = sequence
        for age in spared:
            self._list(age)
        return found

    def _list(self, age: Age) -> None:
        if age not in self._listed:
            self._listed.add(age)
            heapq.heappush(self._newest, (-age[0], -age[1]))
