"""Random LoRA batches for kernel tests: an arena with scattered blocks, a site table, segments.

Everything that no kernel may read is NaN, everything that none may write is a canary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.lora_tables import (
    OFFSET_UNIT,
    RANK_BLOCK,
    TILE_ROWS,
    SegmentPlan,
    SiteColumns,
    SiteTable,
    plan_segments,
    site_columns,
)
from kernels.lora_tuning import num_splits

#: entries and cells before those under test, so that indexing errors show
FIRST_ENTRY, CELL = 2, 1
POPULARITIES = ("distinct", "uniform", "zipf", "identical", "skewed")
CANARY = -1234.5


@dataclass(frozen=True)
class LoraCase:
    table: SiteTable
    plan: SegmentPlan
    columns: SiteColumns
    x: torch.Tensor
    y: torch.Tensor
    max_rank: int

    def empty_u(self) -> torch.Tensor:
        """A NaN-poisoned output for the shrink; its rows are a little longer than they need be."""
        num_rows, in_features = self.x.shape
        splits = num_splits(in_features, self.plan.tile_rows)
        shape = (splits, num_rows, self.columns.num_slices, self.max_rank + 3)
        return torch.full(shape, torch.nan, device=self.x.device)

    @property
    def row_slot(self) -> torch.Tensor:
        """[T] int32, the slot of each row."""
        slots = torch.full((self.x.shape[0],), -1, dtype=torch.int32)
        for first_row, num_rows, slot in self.plan.segments:
            slots[first_row : first_row + num_rows] = slot
        return slots.to(self.x.device)

    def view_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """The rows and columns of y in a copy of its buffer."""
        return torch.as_strided(buffer, self.y.shape, self.y.stride(), self.y.storage_offset())


class ArenaBuilder:
    """Appends arrays at offsets of OFFSET_UNIT bytes, with NaN bytes between them."""

    def __init__(self) -> None:
        self.parts: list[np.ndarray] = [np.full(3 * OFFSET_UNIT, 0xFF, np.uint8)]
        self.size = 3 * OFFSET_UNIT

    def add(self, values: torch.Tensor) -> int:
        """The offset at which the values lie."""
        raw = values.contiguous().view(torch.uint8).reshape(-1).numpy()
        padding = np.full(-raw.size % OFFSET_UNIT + OFFSET_UNIT, 0xFF, np.uint8)
        offset = self.size // OFFSET_UNIT
        self.parts += [raw, padding]
        self.size += raw.size + padding.size
        return offset

    def build(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(self.parts))


def rows_by_slot(
    popularity: str, num_rows: int, num_slots: int, num_base_rows: int, seed: int
) -> list[tuple[int, int, int]]:
    """Segments of `num_rows` rows over slots, then rows of the base."""
    random = np.random.default_rng(seed)
    if popularity == "distinct":
        slots = np.arange(num_rows) % num_slots
    elif popularity == "uniform":
        slots = random.integers(0, num_slots, num_rows)
    elif popularity == "zipf":
        slots = np.minimum(random.zipf(1.5, num_rows) - 1, num_slots - 1)
    elif popularity == "identical":
        slots = np.full(num_rows, num_slots - 1)
    else:
        slots = np.where(np.arange(num_rows) % 4 == 0, random.integers(0, num_slots, num_rows), 0)
    segments, first = [], 0
    for slot in random.permutation(num_slots):
        count = int((slots == slot).sum())
        if count:
            segments.append((first, count, int(slot)))
            first += count
    return [*segments, (num_rows, num_base_rows, -1)]


def lora_case(
    segments: Sequence[tuple[int, int, int]],
    ranks: Sequence[Sequence[int]],
    in_features: int,
    spans: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    *,
    epilogue: bool = True,
    tile_rows: int = TILE_ROWS,
    seed: int = 0,
    device: str = "cpu",
) -> LoraCase:
    """`ranks[slot][slice]`; every second slot has a gain and every third a constant, if asked."""
    random = torch.Generator().manual_seed(seed)
    num_slots, num_slices = len(ranks), len(spans)
    num_rows = sum(count for _, count, _ in segments)
    out_features = sum(cols for _, cols in spans)
    max_rank = max([RANK_BLOCK, *(rank for row in ranks for rank in row)])
    num_blocks = -(-max_rank // RANK_BLOCK)
    entries, cells = FIRST_ENTRY + num_slices + 1, CELL + 2
    a_off = torch.full((num_slots, entries, num_blocks), -1, dtype=torch.int64)
    b_off = a_off.clone()
    rank_of = torch.zeros((num_slots, entries), dtype=torch.int32)
    scale_of = torch.full((num_slots, entries), torch.nan)
    g_off = torch.full((num_slots, cells), -1, dtype=torch.int64)
    c_off = g_off.clone()
    arena = ArenaBuilder()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    for slot in range(num_slots):
        if epilogue and slot % 2:
            g_off[slot, CELL] = arena.add(1.0 + 0.1 * normal(out_features))
        if epilogue and slot % 3 == 0:
            c_off[slot, CELL] = arena.add(normal(out_features))
        for j, (_, num_cols) in enumerate(spans):
            rank, entry = ranks[slot][j], FIRST_ENTRY + j
            rank_of[slot, entry] = rank
            if rank:
                scale_of[slot, entry] = 0.5 + torch.rand((), generator=random)
            for block in range(-(-rank // RANK_BLOCK)):
                count = min(RANK_BLOCK, rank - RANK_BLOCK * block)
                a = normal(count, in_features) / in_features**0.5
                a_off[slot, entry, block] = arena.add(a.to(dtype))
                b_off[slot, entry, block] = arena.add((normal(count, num_cols) / 4).to(dtype))
    live = torch.zeros((num_slots, cells), dtype=torch.uint8)
    at_site = slice(FIRST_ENTRY, FIRST_ENTRY + num_slices)
    live[:, CELL] = (rank_of[:, at_site] > 0).any(1) | (c_off[:, CELL] >= 0)
    table = SiteTable(arena.build(), a_off, b_off, rank_of, scale_of, g_off, c_off, live)
    target = torch.device(device)
    on_device = [getattr(table, name).to(target) for name in SiteTable.__slots__]
    # one more tile than is needed: it is not work, and it holds nonsense
    rank_blocks = [-(-max(row) // RANK_BLOCK) for row in ranks]
    capacity = num_rows // 16 + len(segments) + 1
    plan = plan_segments(segments, capacity, rank_blocks, target, tile_rows)
    plan.tiles[int(plan.num_tiles[0]) :] = 1_000_000
    plan.shrink_tiles[int(plan.num_shrink_tiles[0]) :] = 1_000_000
    x = torch.full((num_rows, in_features + 3), torch.nan, dtype=dtype)
    x[:, :in_features] = normal(num_rows, in_features).to(dtype)
    y = torch.full((num_rows + 2, out_features + 5), CANARY, dtype=dtype)
    y[1:-1, :out_features] = normal(num_rows, out_features).to(dtype)
    return LoraCase(
        SiteTable(*on_device),
        plan,
        site_columns(spans, target),
        x.to(target)[:, :in_features],
        y.to(target)[1:-1, :out_features],
        max_rank,
    )
