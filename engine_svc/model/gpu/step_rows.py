"""From the core's plan to the numbers of a step's inputs: vectorised, since every step pays it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_svc.model.gpu.site_deltas import lora_tile_rows
from engine_svc.model.gpu.step_inputs import Array
from engine_svc.step_chunks import Chunk, Chunks

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, as its chunks name them.

    Args:
        num_rows: T, without padding.
        first_rows: first row of each chunk.
        segments: (first_row, num_rows, slot) of rows of one slot, −1 the base.
        sample_rows, sample_seats: of each token to sample, in the plan's order.
        sample_positions: tokens of the sequence before the sampled one.
        sample_slots: of the sampled rows.
        samples_all: every row is sampled once, in order.
        lora_tile_rows: rows of a LoRA work item at most; 0 where no row has an adapter.
        num_lora_tiles, num_prefill_tiles: work items.
        num_decodes: chunks of one token.
    """

    num_rows: int
    first_rows: Ints
    segments: tuple[tuple[int, int, int], ...]
    sample_rows: Ints
    sample_seats: list[int]
    sample_positions: list[int]
    sample_slots: Ints
    samples_all: bool
    lora_tile_rows: int
    num_lora_tiles: int
    num_prefill_tiles: int
    num_decodes: int

    @property
    def sample_segments(self) -> tuple[tuple[int, int, int], ...]:
        """As segments, of the sampled rows."""
        return _tuples(_runs(self.sample_slots))


def fill_rows(
    chunks: Chunks,
    staged: dict[str, Array],
    padded: int,
    prefill_rows: int,
    lora_rows: int | None,
    rank_blocks: Ints,
) -> StepRows:
    """Write all fields of `staged` but the page updates for `padded` rows.

    Args: prefill_rows, rows of a prefill tile; lora_rows, of a LoRA work item, None: chosen by the
    step's segments; rank_blocks [num_slots], of the adapter in each slot.
    """
    seat, slot = np.asarray(chunks.seats), np.asarray(chunks.slots)
    start = np.asarray(chunks.offsets) + chunks.origin
    count, prompts = np.ones(len(chunks), dtype=np.int64), chunks.prompts
    for row, prompt in prompts.items():
        count[row] = prompt.num_tokens
    end = np.cumsum(count)
    first, num_rows = end - count, int(end[-1])
    if num_rows == len(chunks):
        row_seat, row_slot, positions = seat, slot, start
    else:
        row_seat, row_slot = np.repeat(seat, count), np.repeat(slot, count)
        positions = np.arange(num_rows) + np.repeat(start - first, count)
    staged["token_ids"][:padded] = -1
    for row, prompt in prompts.items():
        staged["token_ids"][first[row] : end[row]] = prompt.token_ids
    _fill(staged["positions"], positions, padded, 0)
    _fill(staged["row_seat"], row_seat, padded, -1)
    _fill(staged["row_slot"], row_slot, padded, -1)
    decodes = first[count == 1]
    _fill(staged["decode_rows"], decodes, len(staged["decode_rows"]), -1)
    staged["num_prefill_tiles"][0] = 0
    if len(decodes) < len(chunks):
        _fill_prefills(staged, seat, start, first, count, prefill_rows)
    segments = _runs(row_slot)
    live = segments[segments[:, 2] >= 0]
    if lora_rows is None:
        lora_rows = lora_tile_rows(padded, live[:, 1], rank_blocks[live[:, 2]])
    _fill_lora(staged, live, lora_rows, rank_blocks)
    sample_seats, sampled = _samples(seat, prompts)
    samples_all = num_rows == len(chunks) and bool((sampled == 1).all())
    sample_rows = end - 1 if samples_all else np.repeat(end - 1, sampled)
    _fill(staged["sample_rows"], sample_rows, len(staged["sample_rows"]), 0)
    return StepRows(
        num_rows=num_rows,
        first_rows=first,
        segments=_tuples(segments),
        sample_rows=sample_rows,
        sample_seats=sample_seats.tolist(),
        sample_positions=(positions[sample_rows] + 1).tolist(),
        sample_slots=row_slot[sample_rows],
        samples_all=samples_all,
        lora_tile_rows=lora_rows if len(live) else 0,
        num_lora_tiles=int(staged["num_tiles"][0]),
        num_prefill_tiles=int(staged["num_prefill_tiles"][0]),
        num_decodes=len(decodes),
    )


def _samples(seat: Ints, prompts: Mapping[int, Chunk]) -> tuple[Ints, Ints]:
    """Seats that sample, in order, and how many of each chunk: a decode's is its own."""
    sampled = np.ones(len(seat), dtype=np.int64)
    for row, prompt in prompts.items():
        sampled[row] = len(prompt.sample_seats)
    seats, end = np.repeat(seat, sampled), np.cumsum(sampled)
    for row, prompt in prompts.items():
        seats[end[row] - sampled[row] : end[row]] = prompt.sample_seats
    return seats, sampled


def _fill(target: Array, values: Ints, padded: int, padding: int) -> None:
    target[: len(values)] = values
    target[len(values) : padded] = padding


def _fill_prefills(
    staged: dict[str, Array], seat: Ints, start: Ints, first: Ints, count: Ints, size: int
) -> None:
    target = staged["prefill_tiles"]
    long = np.flatnonzero(count > 1)
    assert len(target), "a step of decodes alone has no room for prompts"
    chunk, begin, rows = _cut(count[long], size)
    at, n = long[chunk], len(chunk)
    # those that see most positions begin first: a long one that began last would run alone
    order = np.argsort(-(start[at] + begin + rows), kind="stable")
    at, begin, rows = at[order], begin[order], rows[order]
    target[:n, 0] = first[at] + begin
    target[:n, 1] = rows
    target[:n, 2] = seat[at]
    target[:n, 3] = start[at] + begin
    staged["num_prefill_tiles"][0] = n


def _fill_lora(staged: dict[str, Array], live: Ints, size: int, rank_blocks: Ints) -> None:
    segment, begin, rows = _cut(live[:, 1], size)
    slot, n = live[segment, 2], len(segment)
    tiles = staged["tiles"][:n]
    tiles[:, 0] = slot
    tiles[:, 1] = live[segment, 0] + begin
    tiles[:, 2] = rows
    staged["num_tiles"][0] = n
    tile, block, _ = _cut(rank_blocks[slot], 1)
    shrinks = staged["shrink_tiles"][: len(tile)]
    shrinks[:, :3] = tiles[tile]
    shrinks[:, 3] = block
    staged["num_shrink_tiles"][0] = len(tile)


def _cut(counts: Ints, size: int) -> tuple[Ints, Ints, Ints]:
    """Pieces of at most `size` rows: (which count, first row inside it, rows) of each."""
    if (counts <= size).all() and counts.all():
        return np.arange(len(counts)), np.zeros(len(counts), dtype=np.int64), counts
    pieces = -(-counts // size)
    whose = np.repeat(np.arange(len(counts)), pieces)
    begin = (np.arange(len(whose)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * size
    return whose, begin, np.minimum(counts[whose] - begin, size)


def _runs(slots: Ints) -> Ints:
    """[n, 3] (first_row, num_rows, slot) of equal neighbours."""
    if not len(slots):
        return np.zeros((0, 3), dtype=np.int64)
    ends = np.flatnonzero(slots[1:] != slots[:-1]) + 1
    runs = np.empty((len(ends) + 1, 3), dtype=np.int64)
    begins, rows, found = runs.T
    begins[0], begins[1:] = 0, ends
    rows[:-1], rows[-1] = ends, len(slots)
    rows -= begins
    found[:] = slots[begins]
    assert len(set(found.tolist())) == len(found), "chunks not grouped by slot"
    return runs


def _tuples(segments: Ints) -> tuple[tuple[int, int, int], ...]:
    return tuple((first, rows, slot) for first, rows, slot in segments.tolist())
