"""What decodes in every step, as the columns of a step's chunks.

A decode's next chunk differs from its last one in its position alone, and that moves by one in
every step. So nothing is done per decode and step: a sequence joins once it has the page of its
next position, leaves when it is paused, preempted, skipped or ends, and computes from the number of
the step where it is. Rows are grouped by adapter, the base last.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING

from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
)

if TYPE_CHECKING:
    from engine_svc.core.lane import Lane
    from engine_svc.core.sequence import Sequence


class Decodes:
    """Rows of the sequences that decode in the step being planned and in the ones after it."""

    def __init__(self, max_num_seqs: int) -> None:
        #: id of the step that is planned next
        self.step = 0
        self.sequences: list[Sequence] = []
        self._seats = array("q")
        self._slots = array("q")
        #: position of the next token − id of the step that computes it
        self._offsets = array("q")
        #: by seat, of the last chunk that it was in
        self._page_tables: list[tuple[int, ...]] = [()] * max_num_seqs

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

    def turn_page(self, sequence: Sequence) -> None:
        """The pages of one that decodes, or joins, have changed."""
        self._page_tables[sequence.seats[0]] = tuple(sequence.page_ids)

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
        del self.sequences[row], self._seats[row], self._slots[row], self._offsets[row]
        rows, flow = sequence.lane.rows, sequence.flow
        rows[flow] -= 1
        if not rows[flow]:
            del rows[flow]
        planned, last_step = sequence.num_planned, sequence.last_step
        sequence.decodes = None
        sequence.num_planned, sequence.last_step = planned, last_step

    def chunks(self, prompts: Listed[tuple[int, Chunk]]) -> Chunks:
        """The step's rows; from here on it is planned.

        Args: prompts, ascending, each with the row that it goes before.
        """
        seats, slots, offsets = self._seats[:], self._slots[:], self._offsets[:]
        by_row: dict[int, Chunk] = {}
        for num_before, (before, chunk) in enumerate(prompts):
            row = before + num_before
            by_row[row] = chunk
            seats.insert(row, chunk.seat)
            slots.insert(row, chunk.slot)
            offsets.insert(row, chunk.start - self.step)
            self._page_tables[chunk.seat] = chunk.page_ids
        chunks = Chunks(self.step, seats, slots, offsets, self._page_tables.copy(), by_row)
        self.step += 1
        return chunks

    def check_integrity(self) -> None:
        groups: list[Lane] = []
        for sequence, seat, slot, offset in zip(
            self.sequences, self._seats, self._slots, self._offsets, strict=True
        ):
            assert sequence.decodes is self, "a row's sequence has left"
            assert not sequence.names_tokens
            assert (seat,) == sequence.seats, "a row has another's seat"
            assert self._page_tables[seat] == tuple(sequence.page_ids), "a row has other pages"
            assert offset + self.step == sequence.num_planned, "a row is out of step"
            assert (slot == NO_SLOT) is sequence.lane.is_base
            if not groups or groups[-1] is not sequence.lane:
                groups.append(sequence.lane)
        assert len(groups) == len({id(lane) for lane in groups}), "rows of an adapter are apart"
        assert not any(lane.is_base for lane in groups[:-1]), "the base is not last"
