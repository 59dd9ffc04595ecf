"""First-fit allocation of byte ranges; neighbours that come free join."""

from __future__ import annotations

import bisect


class SpanAllocator:
    """Hands out aligned ranges of [0, capacity). Not thread-safe."""

    def __init__(self, capacity: int, align: int) -> None:
        self._capacity, self._align = capacity // align * align, align
        #: start of each free range, ascending, and its end
        self._starts: list[int] = [0] if self._capacity else []
        self._ends: list[int] = [self._capacity] if self._capacity else []
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def try_take(self, num_bytes: int) -> int | None:
        """The offset of a free range, None when no gap is large enough."""
        size = max(1, -(-num_bytes // self._align)) * self._align
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                if end - start == size:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] = start + size
                self._taken[start] = size
                return start
        return None

    def try_take_at(self, offset: int, num_bytes: int) -> bool:
        """Take exactly this range; False when a part of it is taken or outside."""
        size = max(1, -(-num_bytes // self._align)) * self._align
        end = offset + size
        for index, (free_start, free_end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if free_start <= offset and end <= free_end:
                left, right = (free_start, offset), (end, free_end)
                rest = [part for part in (left, right) if part[0] < part[1]]
                self._starts[index : index + 1] = [start for start, _ in rest]
                self._ends[index : index + 1] = [stop for _, stop in rest]
                self._taken[offset] = size
                return True
        return False

    def give_back(self, offset: int) -> None:
        start, end = offset, offset + self._taken.pop(offset)
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index and self._ends[index - 1] == start:
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)

    def check_integrity(self) -> None:
        """Free and taken ranges tile the capacity, and no two free ones touch."""
        ranges = [(start, end, True) for start, end in zip(self._starts, self._ends, strict=True)]
        ranges += [(start, start + size, False) for start, size in self._taken.items()]
        position, after_free = 0, False
        for start, end, free in sorted(ranges):
            assert start == position, (start, position)
            assert end > start, start
            assert not (free and after_free), start
            position, after_free = end, free
        assert position == self._capacity, (position, self._capacity)
