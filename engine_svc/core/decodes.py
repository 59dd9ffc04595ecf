"""What decodes in every step, as columns: the chunks of a step are zipped together from them.

A decode's next chunk differs from its last one in its position alone, and that moves by one in
every step. So nothing is done per decode and step: a sequence joins once it has the page of its
next position, leaves when it is paused, preempted, skipped or ends, and computes from the number of
the step where it is. Rows are grouped by adapter, the base last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from engine_svc.types import NO_SLOT, Chunk

if TYPE_CHECKING:
    from engine_svc.core.lane import Lane
    from engine_svc.core.sequence import Sequence

#: Chunk of a tuple of its fields: three times as fast as Chunk(…)
_chunk_of = cast("Callable[[Iterable[object]], Chunk]", partial(tuple.__new__, Chunk))
_page_tuple = attrgetter("page_tuple")


class Decodes:
    """Rows of the sequences that decode in the step being planned and in the ones after it."""

    def __init__(self) -> None:
        #: id of the step that is planned next
        self.step = 0
        self.sequences: list[Sequence] = []
        self._seats: list[int] = []
        self._slots: list[int] = []
        #: position of the next token − id of the step that computes it
        self._offsets: list[int] = []
        self._sample_seats: list[tuple[int, ...]] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def join(self, sequence: Sequence, slot: int) -> None:
        """It decodes in this step and the next ones, in a slot or NO_SLOT."""
        if sequence.decodes is not None:
            return
        row, rows = self.row_after(sequence.lane), sequence.lane.rows
        rows[sequence.flow] = rows.get(sequence.flow, 0) + 1
        sequence.decodes, sequence.joined_step = self, self.step
        self.sequences.insert(row, sequence)
        self._seats.insert(row, sequence.seats[0])
        self._slots.insert(row, slot)
        self._offsets.insert(row, sequence.num_planned - self.step)
        self._sample_seats.insert(row, sequence.seats)

    def row_after(self, lane: Lane) -> int:
        """A row next to the lane's own, or the first of a new group."""
        if lane.rows:
            for sequence in lane.decoding:
                if sequence.decodes is not None:
                    return self.sequences.index(sequence) + 1
        return len(self.sequences) if lane.is_base else 0

    def leave(self, sequence: Sequence) -> None:
        """It does not run on, as far as is known."""
        if sequence.decodes is None:
            return
        row = self.sequences.index(sequence)
        del self.sequences[row], self._seats[row], self._slots[row]
        del self._offsets[row], self._sample_seats[row]
        rows, flow = sequence.lane.rows, sequence.flow
        rows[flow] -= 1
        if not rows[flow]:
            del rows[flow]
        planned, last_step = sequence.num_planned, sequence.last_step
        sequence.decodes = None
        sequence.num_planned, sequence.last_step = planned, last_step

    def chunks(self) -> list[Chunk]:
        """One chunk for each row; from here on the step is planned."""
        rows = zip(
            self._seats,
            self._slots,
            map(self.step.__add__, self._offsets),
            repeat(1),
            repeat(()),
            map(_page_tuple, self.sequences),
            self._sample_seats,
            repeat(None),
            repeat(-1),
            strict=False,
        )
        self.step += 1
        return list(map(_chunk_of, rows))

    def check_integrity(self) -> None:
        groups: list[Lane] = []
        for sequence, seat, slot, offset, seats in zip(
            self.sequences, self._seats, self._slots, self._offsets, self._sample_seats, strict=True
        ):
            assert sequence.decodes is self, "a row's sequence has left"
            assert not sequence.names_tokens
            assert (seat,) == seats == sequence.seats, "a row has another's seat"
            assert offset + self.step == sequence.num_planned, "a row is out of step"
            assert (slot == NO_SLOT) is sequence.lane.is_base
            if not groups or groups[-1] is not sequence.lane:
                groups.append(sequence.lane)
        assert len(groups) == len({id(lane) for lane in groups}), "rows of an adapter are apart"
        assert not any(lane.is_base for lane in groups[:-1]), "the base is not last"
