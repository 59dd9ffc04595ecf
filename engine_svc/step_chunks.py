"""The rows of a step: which part of which sequence it computes. Vocabulary, as
engine_svc/types.py is."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Chunk(NamedTuple):
    """The part of one sequence that a step computes: positions start … start + num_tokens − 1.

    `token_ids` has num_tokens entries for prefill. It is empty for a decode (num_tokens 1): the
    input is the seat's last sampled token, which may still be on the device, and the seat samples.
    """

    seat: int
    slot: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    #: pages of positions 0 … start + num_tokens − 1, in order
    page_ids: tuple[int, ...]
    #: seats that sample from the last position: () inside a prompt, (seat,) usually, n of them for
    #: n choices
    sample_seats: tuple[int, ...] = ()
    #: top-k for log probabilities of the prompt tokens that follow each position of this chunk
    prompt_logprobs: int | None = None
    #: the prompt token after the chunk's last one, where prompt_logprobs needs it; −1 = none
    next_prompt_token: int = -1


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of a step, a row each, as columns: most rows are decodes, of which seat, slot and
    position say everything, and a step of hundreds is made and read without a look at each.

    Iteration yields a `Chunk` for each row.

    Args:
        seats, slots, offsets: [n] 64-bit, which NumPy reads where they lie; row i begins at
            position origin + offsets[i], so that decodes differ from step to step in origin alone.
        page_tables: by seat; pages as `Chunk.page_ids` has them, of a decode the same tuple until
            they change. Those of seats without a row say nothing.
        prompts: by row, the chunks that name their tokens; all other rows are decodes.
    """

    origin: int
    seats: array[int]
    slots: array[int]
    offsets: array[int]
    page_tables: Sequence[tuple[int, ...]]
    prompts: Mapping[int, Chunk]

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Chunks:
        """For plans made by hand. Raises: ValueError where a chunk is neither a prompt nor a
        decode."""
        rows = list(chunks)
        for chunk in rows:
            is_decode = chunk.num_tokens == 1 and chunk.sample_seats == (chunk.seat,)
            if len(chunk.token_ids) != chunk.num_tokens and (chunk.token_ids or not is_decode):
                raise ValueError(
                    f"seat {chunk.seat}: {len(chunk.token_ids)} token_ids for {chunk.num_tokens} "
                    f"tokens; only a decode, one token that its own seat samples, has none"
                )
        page_tables: list[tuple[int, ...]] = [()] * (1 + max((c.seat for c in rows), default=-1))
        for chunk in rows:
            page_tables[chunk.seat] = chunk.page_ids
        return cls(
            origin=0,
            seats=array("q", [chunk.seat for chunk in rows]),
            slots=array("q", [chunk.slot for chunk in rows]),
            offsets=array("q", [chunk.start for chunk in rows]),
            page_tables=page_tables,
            prompts={row: chunk for row, chunk in enumerate(rows) if chunk.token_ids},
        )

    def __len__(self) -> int:
        return len(self.seats)

    def __iter__(self) -> Iterator[Chunk]:
        for row, (seat, slot, offset) in enumerate(
            zip(self.seats, self.slots, self.offsets, strict=True)
        ):
            yield self.prompts.get(row) or Chunk(
                seat, slot, self.origin + offset, 1, (), self.page_tables[seat], (seat,)
            )

    @property
    def num_tokens(self) -> int:
        return len(self.seats) + sum([c.num_tokens - 1 for c in self.prompts.values()])

    def tokens_by_slot(self) -> dict[int, int]:
        """In the order of the rows."""
        counts = Counter(self.slots)
        for chunk in self.prompts.values():
            counts[chunk.slot] += chunk.num_tokens - 1
        return counts
