"""The page tables of all seats: on the device, with the host's picture of what is there.

A plan has all pages of each seat. Only what differs from the seat's last ones is sent; so a seat
that is opened again, a page that was copied, a sequence that came back after a preemption need no
special case.
"""

from __future__ import annotations

from itertools import compress, count
from operator import is_not

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.model.gpu.staging import StagingRing
from engine_svc.step_chunks import Chunks
from kernels.scatter_pages import scatter_pages
from loraplex.status import FieldInvalid

Updates = npt.NDArray[np.int32]

_INT32_NUMBERS = 2**31
#: updates that one round beside the step's own inputs carries, and the numbers before them: their
#: count, and so many that they begin at a multiple of 16 bytes, as in a step's inputs
_ROUND, _HEAD = 4096, 4


class PageTable:
    """[max_num_seqs, max_pages] int32 on the device."""

    def __init__(self, num_seats: int, max_pages: int, device: torch.device) -> None:
        """Raises: FieldInvalid when a flat index would not fit 32 bits."""
        if num_seats * max_pages >= _INT32_NUMBERS:
            raise FieldInvalid(
                "max_num_seqs", num_seats,
                f"below {_INT32_NUMBERS // max_pages} at {max_pages} pages a sequence",
                reason="CONFIG_INVALID",
            )  # fmt: skip
        self.max_pages = max_pages
        self.device_table = torch.zeros((num_seats, max_pages), dtype=torch.int32, device=device)
        self._sent: list[tuple[int, ...]] = [()] * num_seats
        self._round = torch.zeros(_HEAD + 2 * _ROUND, dtype=torch.int32, device=device)
        self._ring = StagingRing(1, _HEAD + 2 * _ROUND, device)

    @property
    def num_bytes(self) -> int:
        return self.device_table.nbytes + self._round.nbytes

    def updates(self, chunks: Chunks) -> Updates:
        """[n, 2] (flat index, page) that the device lacks for these chunks; it counts as sent."""
        sent, tables = self._sent, chunks.page_tables
        changed = list(compress(count(), map(is_not, sent, tables)))
        if not changed:
            return _NONE
        flat: list[int] = []
        pages: list[int] = []
        for seat in changed:
            before, after = sent[seat], tables[seat]
            same = _common(before, after)
            flat.extend(range(seat * self.max_pages + same, seat * self.max_pages + len(after)))
            pages.extend(after[same:])
            # a shorter list leaves the tail on the device as it is
            longer = len(before) > len(after) and same == len(after)
            sent[seat] = before if longer else after
        return np.array((flat, pages), dtype=np.int32).T

    def write(self, updates: Updates) -> None:
        """More updates than a step's inputs have room for, in rounds; may wait for the device."""
        for first in range(0, len(updates), _ROUND):
            part = updates[first : first + _ROUND]
            staged = self._ring.arrays[self._ring.acquire()]
            staged[0] = len(part)
            end = _HEAD + 2 * len(part)
            staged[_HEAD:end] = part.reshape(-1)
            self._ring.copy_to(self._round, end)
            scatter_pages(self._round[_HEAD:].view(-1, 2), self._round[:1], self.device_table)


def _common(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Length of the common beginning; usually all of the shorter one."""
    shorter = min(len(before), len(after))
    if before[:shorter] == after[:shorter]:
        return shorter
    differs = (i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    return next(differs)


_NONE: Updates = np.zeros((0, 2), dtype=np.int32)
