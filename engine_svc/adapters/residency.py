"""Which packed adapters lie in the host region, which of them the core holds, and what goes first.

Book-keeping under the loader's lock; the bytes are written by whoever took the span.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine_svc.adapters.fetch import FROM_STORE, Fetched
from engine_svc.adapters.host_region import HostRegion
from engine_svc.types import HostSpan


@dataclass(slots=True)
class _Resident:
    fetched: Fetched
    held: bool


class Residency:
    """`max_adapters` 0: only bytes limit it. What is held or pinned is never evicted."""

    def __init__(self, region: HostRegion, max_adapters: int) -> None:
        self._region, self._max_adapters = region, max_adapters
        #: least recently wanted first
        self._resident: OrderedDict[str, _Resident] = OrderedDict()
        #: came from the store and have no copy in the disk cache yet, oldest first
        self._uncopied: dict[str, None] = {}
        #: are being copied
        self._pinned: set[str] = set()
        self.evictions = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    @property
    def num_held(self) -> int:
        return sum(resident.held for resident in self._resident.values())

    @property
    def num_bytes(self) -> int:
        return sum(resident.fetched.span.num_bytes for resident in self._resident.values())

    def try_hold(self, digest: str) -> Fetched | None:
        """Hold an adapter that is here."""
        resident = self._resident.get(digest)
        if resident is None:
            return None
        resident.held = True
        self._resident.move_to_end(digest)
        return resident.fetched

    def add(self, digest: str, fetched: Fetched, *, held: bool) -> None:
        self._resident[digest] = _Resident(fetched, held)
        if fetched.tier == FROM_STORE:
            self._uncopied[digest] = None
        self._evict_beyond_count()

    def adopt(self, digest: str, fetched: Fetched) -> bool:
        """Take over bytes that lie in the region already, held; False when the range is taken."""
        if self.try_hold(digest) is not None:
            return True
        if not self._region.try_take_at(fetched.span):
            return False
        self._resident[digest] = _Resident(fetched, held=True)
        return True

    @property
    def num_uncopied(self) -> int:
        return len(self._uncopied)

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def pin_uncopied(self) -> tuple[str, Fetched]:
        """(digest, where it lies) of the oldest that has no copy: until `unpin` its bytes stay
        there, held or not."""
        digest = next(iter(self._uncopied))
        del self._uncopied[digest]
        self._pinned.add(digest)
        return digest, self._resident[digest].fetched

    def unpin(self, digest: str) -> None:
        self._pinned.remove(digest)
        self._evict_beyond_count()

    def let_go(self, digest: str) -> None:
        """It may be evicted; an adapter that is not here is nothing to let go."""
        resident = self._resident.get(digest)
        if resident is not None:
            resident.held = False
            self._evict_beyond_count()

    def let_go_all(self) -> None:
        for resident in self._resident.values():
            resident.held = False
        self._evict_beyond_count()

    def try_take(self, num_bytes: int) -> HostSpan | None:
        """A span, after evicting as many as that takes; None when what is left is held or
        pinned.

        Raises: ResourceExhausted DISK_FULL.
        """
        while True:
            span = self._region.try_take(num_bytes)
            if span is not None or not self._evict_one():
                return span

    def check_integrity(self) -> None:
        self._region.check_integrity()
        assert {*self._uncopied, *self._pinned} <= self._resident.keys()
        spans = sorted(
            (resident.fetched.span.offset, resident.fetched.span.num_bytes)
            for resident in self._resident.values()
        )
        end = 0
        for offset, num_bytes in spans:
            assert offset >= end, (offset, end)
            end = offset + num_bytes

    def _evict_one(self) -> bool:
        for digest, resident in self._resident.items():
            if not (resident.held or digest in self._pinned):
                del self._resident[digest]
                self._uncopied.pop(digest, None)
                self._region.give_back(resident.fetched.span)
                self.evictions += 1
                return True
        return False

    def _evict_beyond_count(self) -> None:
        while self._max_adapters and len(self._resident) > self._max_adapters:
            if not self._evict_one():
                return
