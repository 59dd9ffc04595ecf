"""A step's inputs on the GPU's way: buckets, rows, page tables."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine_svc.model.gpu import page_table
from engine_svc.model.gpu.buckets import (
    MAX_CAPTURES,
    bucket_of,
    decode_buckets,
    long_buckets,
    mixed_buckets,
    padded_rows,
)
from engine_svc.model.gpu.page_loads import _runs
from engine_svc.model.gpu.page_table import _ROUND, PageTable
from engine_svc.model.gpu.site_deltas import SHORT_STEP_ROWS, captured_tile_rows, lora_tile_rows
from engine_svc.model.gpu.step_inputs import InputSizes, StepInputs
from engine_svc.model.gpu.step_rows import StepRows, fill_rows
from engine_svc.model.gpu.step_shapes import StepLimits, trunk_step
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
)
from kernels.lora_tables import PREFILL_TILE_ROWS
from loraplex.status import FieldInvalid

CPU = torch.device("cpu")
LORA_ROWS, PREFILL_ROWS = 16, 8
#: of the adapter in each of six slots; one has none
RANK_BLOCKS = np.array([1, 3, 0, 1, 2, 1])


@pytest.mark.parametrize("seqs", [1, 2, 3, 8, 100, 256, 300, 512, 1000, 4096])
def test_buckets_hold_every_number_of_sequences_within_the_limit_of_captures(seqs: int) -> None:
    decodes = decode_buckets(seqs)
    assert list(decodes) == sorted(set(decodes))
    assert decodes[-1] == seqs
    mixed = mixed_buckets(decodes, 8192)
    long = long_buckets(decodes, mixed)
    assert 2 * len(decodes) + len(mixed) + len(long) <= MAX_CAPTURES
    assert set(long) <= set(mixed)
    for rows in range(1, seqs + 1):
        bucket = bucket_of(decodes, rows)
        assert bucket is not None
        assert rows <= bucket <= 2 * rows
    assert bucket_of(decodes, seqs + 1) is None


def test_the_largest_steps_with_prompts_are_captured_with_long_work_items_too() -> None:
    def long(seqs: int, most: int) -> tuple[int, ...]:
        decodes = decode_buckets(seqs)
        return long_buckets(decodes, mixed_buckets(decodes, most))

    assert long(64, 1024) == (640, 768, 896, 1024)
    assert long(128, 1024) == (640, 768, 896, 1024)
    assert long(192, 1024) == (896, 1024)
    assert long(256, 1024) == long(64, 512) == ()


@pytest.mark.parametrize("most", [17, 512, 1000, 8192])
def test_large_steps_are_padded_to_few_sizes_by_at_most_a_quarter(most: int) -> None:
    sizes = {padded_rows(rows, most) for rows in range(1, most + 1)}
    assert len(sizes) < 40
    for rows in range(64, most + 1):
        assert rows <= padded_rows(rows, most) <= 1.25 * rows


def random_chunks(rng: random.Random, seats: int, slots: int) -> list[Chunk]:
    chunks = []
    order = sorted(rng.sample(range(-1, slots), rng.randint(1, slots)), key=lambda s: (s < 0, s))
    free = list(range(seats))
    rng.shuffle(free)
    for slot in order:
        for _ in range(rng.randint(1, 3)):
            if not free:
                break
            seat, start = free.pop(), rng.randint(0, 40)
            count = rng.choice([1, 1, 1, 2, 7, 8, 9, 33])
            named = count > 1 or rng.random() < 0.3
            tokens = tuple(rng.randrange(99) for _ in range(count)) if named else ()
            sampling: tuple[int, ...] = (seat,) if not named or rng.random() < 0.8 else ()
            if count > 1 and free and rng.random() < 0.3:
                sampling = (seat, free.pop())
            chunks.append(Chunk(seat, slot, start, count, tokens, (), sampling))
    return chunks


def small_inputs() -> StepInputs:
    return StepInputs(InputSizes(512, 24, 64, 3, 128, 8), 3, CPU)


def filled(inputs: StepInputs, chunks: list[Chunk], padded: int) -> StepRows:
    # positions count from the origin, as in the core's plans
    columns = Chunks.of(chunks)
    offsets = array("q", [start - 70 for start in columns.offsets])
    columns = replace(columns, origin=70, offsets=offsets)
    rows = fill_rows(columns, inputs.acquire(), padded, PREFILL_ROWS, LORA_ROWS, RANK_BLOCKS)
    inputs.send()
    return rows


def test_every_row_position_and_work_item_is_where_the_chunks_say() -> None:
    rng, inputs = random.Random(5), small_inputs()
    for _ in range(60):
        chunks = random_chunks(rng, seats=24, slots=6)
        expected: list[tuple[int, int, int, int]] = []
        for chunk in chunks:
            for i in range(chunk.num_tokens):
                token = chunk.token_ids[i] if chunk.token_ids else -1
                expected.append((token, chunk.start + i, chunk.seat, chunk.slot))
        rows = filled(inputs, chunks, len(expected) + 5)
        named = ("token_ids", "positions", "row_seat", "row_slot")
        table = torch.stack([inputs.on_device[name] for name in named], dim=1)
        assert table[: len(expected)].tolist() == [list(row) for row in expected]
        assert table[len(expected) : len(expected) + 5].tolist() == [[-1, 0, -1, -1]] * 5
        check_work(inputs, chunks, rows, expected)
        check_samples(inputs, chunks, rows)


def check_work(
    inputs: StepInputs, chunks: list[Chunk], rows: StepRows, expected: list[Any]
) -> None:
    """LoRA tiles cover the rows of adapters once, decodes and prefill tiles all rows once."""
    device = inputs.on_device
    seen: list[int] = []
    for slot, first, count in device["tiles"][: rows.num_lora_tiles].tolist():
        assert 1 <= count <= LORA_ROWS
        assert {expected[row][3] for row in range(first, first + count)} == {slot}
        seen.extend(range(first, first + count))
    assert sorted(seen) == [row for row, facts in enumerate(expected) if facts[3] >= 0]
    assert int(device["num_tiles"]) == rows.num_lora_tiles
    tiles = device["tiles"][: rows.num_lora_tiles].tolist()
    shrinks = [[*tile, block] for tile in tiles for block in range(RANK_BLOCKS[tile[0]])]
    assert device["shrink_tiles"][: int(device["num_shrink_tiles"])].tolist() == shrinks
    attended = [row for row in device["decode_rows"].tolist() if row >= 0]
    ends = []
    for first, count, seat, start in device["prefill_tiles"][: rows.num_prefill_tiles].tolist():
        assert 1 <= count <= PREFILL_ROWS
        for i in range(count):
            assert expected[first + i][1:3] == (start + i, seat)
            attended.append(first + i)
        ends.append(start + count)
    assert sorted(attended) == list(range(len(expected)))
    assert ends == sorted(ends, reverse=True)


def check_samples(inputs: StepInputs, chunks: list[Chunk], rows: StepRows) -> None:
    wanted = []
    first = 0
    for chunk in chunks:
        first += chunk.num_tokens
        for seat in chunk.sample_seats:
            wanted.append((first - 1, seat, chunk.start + chunk.num_tokens, chunk.slot))
    assert rows.sample_rows.tolist() == [row for row, *_ in wanted]
    assert rows.sample_seats == [seat for _, seat, *_ in wanted]
    assert rows.sample_positions == [position for *_, position, _ in wanted]
    by_segment = [slot for _, count, slot in rows.sample_segments for _ in range(count)]
    assert by_segment == [slot for *_, slot in wanted]
    sent = inputs.on_device["sample_rows"].tolist()
    assert sent == [*(row for row, *_ in wanted), *[0] * (len(sent) - len(wanted))]


@pytest.mark.parametrize("num_slots", [1, 4, 64, 2048])
@pytest.mark.parametrize("seqs", [1, 100, 512, 600, 1024, 4096])
def test_work_lists_hold_every_step_of_one_adapter_or_many(seqs: int, num_slots: int) -> None:
    limits = StepLimits(seqs + 128, seqs, num_slots, 4, PREFILL_ROWS)
    for sizes, most in ((limits.decode_sizes(), seqs), (limits.mixed_sizes(), seqs + 128)):
        for rows in {1, *(min(most, n) for n in (512, 513, 2048, 2049)), most}:
            segments = min(rows, num_slots)
            counts = np.array([rows - segments + 1] + [1] * (segments - 1))
            launched = lora_tile_rows(rows, counts, np.ones_like(counts))
            assert int((-(-counts // launched)).sum()) <= sizes.lora_tiles
            for size in {captured_tile_rows(rows), PREFILL_TILE_ROWS}:
                captured = int((-(-counts // size)).sum())
                assert captured <= limits.captured_lora_tiles(rows, size) <= sizes.lora_tiles


@pytest.mark.parametrize(
    ("counts", "blocks", "rows"),
    [
        ([512, 512], 1, 16),
        ([512, 512], 4, 128),
        ([64] * 16, 1, 16),
        ([1] * 64 + [960], 2, 16),
        ([2048], 1, 128),
        ([1] * 600, 4, 16),
        ([], 1, 16),
    ],
)
def test_work_items_are_long_where_that_reads_much_less(
    counts: list[int], blocks: int, rows: int
) -> None:
    segments = np.array(counts, dtype=np.int64)
    of_ranks = np.full_like(segments, blocks)
    assert lora_tile_rows(SHORT_STEP_ROWS, segments, of_ranks) == rows
    assert lora_tile_rows(SHORT_STEP_ROWS + 1, segments, of_ranks) == PREFILL_TILE_ROWS


def test_an_older_steps_numbers_never_show_in_a_shorter_step() -> None:
    inputs = small_inputs()
    long = [Chunk(seat, seat, 3, 9, (1,) * 9, (), (seat,)) for seat in range(6)]
    short = [Chunk(0, NO_SLOT, 3, 1, (), (), (0,))]
    for _ in range(4):
        filled(inputs, long, 64)
        rows = filled(inputs, short, 8)
        assert (rows.num_lora_tiles, rows.num_prefill_tiles) == (0, 0)
        assert inputs.on_device["row_seat"][:8].tolist() == [0, *[-1] * 7]
        assert inputs.on_device["decode_rows"].tolist() == [0, *[-1] * 23]


class Seats:
    """What the core's sequences hold; the oracle of a page table."""

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.pages: dict[int, tuple[int, ...]] = {}

    def step(self, chunks: list[Chunk]) -> int:
        updates = self.table.updates(Chunks.of(chunks))
        assert len(np.unique(updates[:, 0])) == len(updates)
        self.table.write(updates)
        for chunk in chunks:
            found = self.table.device_table[chunk.seat, : len(chunk.page_ids)]
            assert found.tolist() == list(chunk.page_ids)
        return len(updates)


def on_pages(seat: int, pages: tuple[int, ...]) -> Chunk:
    return Chunk(seat, NO_SLOT, 0, 1, (), pages, (seat,))


def test_only_new_pages_are_sent_and_a_page_that_changed_is() -> None:
    seats = Seats(PageTable(4, 16, CPU))
    pages = (5, 6, 7)
    assert seats.step([on_pages(1, pages), on_pages(2, (9,))]) == 4
    assert seats.step([on_pages(1, pages), on_pages(2, (9,))]) == 0
    assert seats.step([on_pages(1, (5, 6, 7, 8))]) == 1
    assert seats.step([on_pages(1, (5, 6, 11, 8))]) == 2, "copied on write"
    assert seats.step([on_pages(1, (5, 6))]) == 0, "a shorter chunk of the same sequence"
    assert seats.step([on_pages(1, (5, 6, 11, 8))]) == 0
    assert seats.step([on_pages(1, (3,))]) == 1, "another sequence took the seat"
    assert seats.step([on_pages(1, (5, 6, 11, 8))]) == 4, "the first came back"


def test_random_seats_always_see_their_own_pages() -> None:
    rng = random.Random(3)
    seats = Seats(PageTable(6, 12, CPU))
    held: dict[int, list[int]] = {}
    for _ in range(500):
        chunks = []
        for seat in rng.sample(range(6), rng.randint(1, 6)):
            pages = held.setdefault(seat, [])
            what = rng.random()
            if what < 0.1:
                pages.clear()
            elif what < 0.2 and pages:
                pages[rng.randrange(len(pages))] = rng.randrange(999)
            if not pages or (what > 0.6 and len(pages) < 12):
                pages.append(rng.randrange(999))
            shown = len(pages) if what < 0.9 else rng.randint(1, len(pages))
            chunks.append(on_pages(seat, tuple(pages[:shown])))
        seats.step(chunks)


def test_more_updates_than_a_round_holds_all_arrive() -> None:
    long = tuple(range(2 * _ROUND + 7))
    assert Seats(PageTable(2, len(long), CPU)).step([on_pages(1, long)]) == len(long)


def test_a_round_of_updates_is_for_triton_like_those_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pointer of another alignment would be another kernel, compiled while serving."""
    inputs = small_inputs()
    of_a_step = [inputs.on_device[name].data_ptr() % 16 for name in ("updates", "num_updates")]
    found: list[list[int]] = []

    def scattered(*tensors: torch.Tensor) -> None:
        found.append([tensor.data_ptr() % 16 for tensor in tensors[:2]])

    monkeypatch.setattr(page_table, "scatter_pages", scattered)
    table = PageTable(1, 4, CPU)
    table.write(table.updates(Chunks.of([on_pages(0, (1, 2))])))
    assert found == [of_a_step] == [[0, 0]]


def test_a_table_beyond_32_bits_is_refused_by_name() -> None:
    with pytest.raises(FieldInvalid, match="max_num_seqs"):
        PageTable(4096, 2**20, CPU)


def test_consecutive_pages_are_copied_together() -> None:
    assert _runs([4, 5, 6, 9, 8, 7, 8]) == [(0, 4, 3), (3, 9, 1), (4, 8, 1), (5, 7, 2)]


def test_prompts_alone_launch_no_attention_of_decodes() -> None:
    limits = StepLimits(max_rows=64, max_num_seqs=4, num_slots=2, rank_blocks=1, prefill_rows=16)
    inputs = StepInputs(limits.mixed_sizes(), 3, torch.device("cpu"))

    def decode_rows(*counts: int) -> torch.Tensor:
        chunks = Chunks.of(
            Chunk(seat, NO_SLOT, 5, n, (1,) * n, (0,)) for seat, n in enumerate(counts)
        )
        rows = fill_rows(
            chunks, inputs.acquire(), 32, limits.prefill_rows, None, np.ones(2, np.int64)
        )
        inputs.send()
        return trunk_step(inputs, limits, 32, rows, False).decode_rows

    assert decode_rows(3, 20).tolist() == []
    assert decode_rows(3, 1, 20).tolist() == [3, -1, -1, -1]
