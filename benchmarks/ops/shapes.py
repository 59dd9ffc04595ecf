"""Cells of the `ops` benchmark: a model's sites, who shares an adapter, the tables of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine_svc.model.gpu.buckets import FEW_ROWS
from engine_svc.model.gpu.site_deltas import lora_tile_rows
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

#: steps of this many rows and more are prompts of so many
PREFILL_ROWS = 512
MAX_RANK = 256
MIXED_RANKS = (8, 16, 32, 64)
SCALE = 2.0
#: standard deviation of all weights; a delta is then about a tenth of an output
WEIGHT_STD = 0.02


@dataclass(frozen=True, slots=True)
class SiteShape:
    name: str
    in_features: int
    widths: tuple[int, ...]

    @property
    def out_features(self) -> int:
        return sum(self.widths)


LLAMA_8B = (
    SiteShape("qkv", 4096, (4096, 1024, 1024)),
    SiteShape("o", 4096, (4096,)),
    SiteShape("gate_up", 4096, (14336, 14336)),
    SiteShape("down", 14336, (4096,)),
)
#: for a dry run without a GPU
TINY = (
    SiteShape("qkv", 96, (64, 32, 32)),
    SiteShape("o", 64, (96,)),
    SiteShape("gate_up", 96, (80, 80)),
    SiteShape("down", 80, (96,)),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """`rows[i]` rows of adapter i, whose rank is `ranks[i]`; `tile_rows` of a work item chooses the
    kernels."""

    tokens: int
    popularity: str
    rank: str
    rows: tuple[int, ...]
    ranks: tuple[int, ...]
    is_prefill: bool = False
    tile_rows: int = TILE_ROWS

    @property
    def name(self) -> str:
        return f"{self.tokens} {self.popularity}, rank {self.rank}"

    def floor_bytes(self, sites: Sequence[SiteShape], item_bytes: int = 2) -> int:
        """Each adapter's weights and x once, y read and written: what any form must move."""
        per_rank = sum(s.in_features * len(s.widths) + s.out_features for s in sites)
        per_token = sum(s.in_features + 2 * s.out_features for s in sites)
        return item_bytes * (sum(self.ranks) * per_rank + self.tokens * per_token)


def cell(tokens: int, popularity: str, rank: int | str) -> Cell:
    """A cell of the grid; `rank` "mixed" takes MIXED_RANKS in turn."""
    counts = Counter(_adapters(tokens, popularity))
    adapters = sorted(counts)
    ranks = [MIXED_RANKS[i % len(MIXED_RANKS)] if rank == "mixed" else int(rank) for i in adapters]
    rows = tuple(counts[i] for i in adapters)
    is_prefill, tile_rows = tokens >= PREFILL_ROWS, TILE_ROWS
    if tokens > FEW_ROWS:
        # as the engine chooses
        tile_rows = lora_tile_rows(tokens, np.array(rows), -(-np.array(ranks) // RANK_BLOCK))
    return Cell(tokens, popularity, str(rank), rows, tuple(ranks), is_prefill, tile_rows)


def _adapters(tokens: int, popularity: str) -> list[int]:
    """The adapter of each row; a sequence of a prefill has PREFILL_ROWS rows."""
    step = PREFILL_ROWS if tokens >= PREFILL_ROWS else 1
    count = tokens // step
    if popularity == "identical":
        ids = [0] * count
    elif popularity == "uniform-8":
        ids = [i % 8 for i in range(count)]
    elif popularity == "distinct":
        ids = list(range(count))
    elif popularity == "Zipf":
        weights = torch.arange(1, 33, dtype=torch.float32) ** -1.5
        generator = torch.Generator().manual_seed(1000 + tokens)
        ids = torch.multinomial(weights, count, replacement=True, generator=generator).tolist()
    else:
        raise ValueError(f"popularity is {popularity!r}")
    return [i for i in ids for _ in range(step)]


@dataclass(frozen=True)
class Adapters:
    """A cell's adapters on all layers, as the engine lays them out."""

    sites: tuple[SiteShape, ...]
    num_layers: int
    table: SiteTable
    columns: tuple[SiteColumns, ...]
    plan: SegmentPlan
    row_slot: torch.Tensor

    def first_entry(self, layer: int, site: int) -> int:
        before = sum(len(s.widths) for s in self.sites[:site])
        return layer * sum(len(s.widths) for s in self.sites) + before

    def site_cell(self, layer: int, site: int) -> int:
        return layer * len(self.sites) + site


def build_adapters(
    shape: Cell,
    sites: tuple[SiteShape, ...],
    num_layers: int,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Adapters:
    """Random weights in one arena. Slots that no row uses hold nothing."""
    blocks = MAX_RANK // RANK_BLOCK
    slices = [(s.in_features, width) for s in sites for width in s.widths]
    num_entries = num_layers * len(slices)
    a_off = np.full((num_slots, num_entries, blocks), -1, np.int64)
    b_off, end = a_off.copy(), 0
    ranks = np.zeros((num_slots, num_entries), np.int32)
    for slot, rank in enumerate(shape.ranks):
        ranks[slot] = rank
        for entry in range(num_entries):
            for offsets, width in zip((a_off, b_off), slices[entry % len(slices)], strict=True):
                for block in range(-(-rank // RANK_BLOCK)):
                    count = min(RANK_BLOCK, rank - block * RANK_BLOCK)
                    offsets[slot, entry, block] = end
                    end += count * width * dtype.itemsize // OFFSET_UNIT
    arena = torch.empty(end * OFFSET_UNIT, dtype=torch.uint8, device=device)
    arena.view(dtype).normal_(std=WEIGHT_STD)
    cells = num_layers * len(sites)
    none = torch.full((num_slots, cells), -1, dtype=torch.int64, device=device)
    live = torch.zeros((num_slots, cells), dtype=torch.uint8, device=device)
    live[: len(shape.ranks)] = 1
    table = SiteTable(
        arena,
        torch.from_numpy(a_off).to(device),
        torch.from_numpy(b_off).to(device),
        torch.from_numpy(ranks).to(device),
        torch.full((num_slots, num_entries), SCALE, device=device),
        none,
        none,
        live,
    )
    plan = plan_of(shape, num_slots, shape.tile_rows, device)
    row_slot = torch.repeat_interleave(
        torch.arange(len(shape.rows), dtype=torch.int32), torch.tensor(shape.rows)
    )
    columns = tuple(site_columns(spans(site), device) for site in sites)
    return Adapters(sites, num_layers, table, columns, plan, row_slot.to(device))


def plan_of(shape: Cell, num_slots: int, tile_rows: int, device: torch.device) -> SegmentPlan:
    """The cell's rows, grouped by slot."""
    segments, first = [], 0
    for slot, count in enumerate(shape.rows):
        segments.append((first, count, slot))
        first += count
    rank_blocks = [-(-rank // RANK_BLOCK) for rank in shape.ranks]
    capacity = shape.tokens // tile_rows + num_slots
    return plan_segments(segments, capacity, rank_blocks, device, tile_rows)


def spans(site: SiteShape) -> list[tuple[int, int]]:
    """(col0, num_cols) of each slice."""
    return [(sum(site.widths[:i]), width) for i, width in enumerate(site.widths)]
