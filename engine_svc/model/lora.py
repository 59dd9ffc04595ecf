"""LoRA of one step: added in place to the output of each fused base linear.

Two forms of `StepLora`: KernelLora here calls the kernels, which index the arena through the site
table; ViewLora of lora_views.py is the CPU's fast path in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from engine_svc.layout import HEAD_SITE, RANK_BLOCK, AdapterLayout, Site
from engine_svc.model.site_table import SiteTableRows, SlotRow
from kernels.lora_add import lora_add
from kernels.lora_delta import lora_delta
from kernels.lora_shrink import lora_shrink
from kernels.lora_tables import (
    TILE_ROWS,
    LoraDelta,
    SegmentPlan,
    SiteColumns,
    plan_segments,
    site_columns,
)
from kernels.lora_tuning import num_splits
from loraplex.base_model import NO_LAYER

#: (first_row, num_rows, slot)
Segment = tuple[int, int, int]


class StepLora(Protocol):
    """What the layers call. Between two `begin` the segments do not change."""

    def bind(self, slot: int, row: SlotRow | None) -> None:
        """The slot holds another adapter from now on, or none."""
        ...

    def begin(self, segments: Sequence[Segment]) -> None:
        """Plan a step: its adapters' rows, grouped by slot."""
        ...

    def add(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """y ← g ⊙ y + c + B·u on the rows of adapters. x [T, in_features], y [T, out_features].

        `layer` NO_LAYER: `site` is one of layout.outer_sites.
        """
        ...


class KernelLora:
    """The kernels over the site table: Triton on a GPU, the references elsewhere."""

    def __init__(
        self, rows: SiteTableRows, layout: AdapterLayout, max_tokens: int, num_slots: int
    ) -> None:
        """Args: max_tokens, rows of a step or of its sampled rows, whichever can be more."""
        self._rows, self._layout = rows, layout
        self._device = rows.table.arena.device
        self._capacity = -(-max_tokens // TILE_ROWS) + min(num_slots, max_tokens)
        self._rank = -(-rows.max_rank // RANK_BLOCK) * RANK_BLOCK
        sites = [*layout.sites, layout.outer_sites[HEAD_SITE]]
        widest = max(site.num_slices * num_splits(site.in_features) for site in sites)
        self._u = torch.empty(max_tokens * widest * self._rank, device=self._device)
        self._row_slot = torch.full((max_tokens,), -1, dtype=torch.int32, device=self._device)
        self._columns = [self._columns_of(0, site) for site in layout.sites]
        self._outer_columns = [self._columns_of(NO_LAYER, site) for site in layout.outer_sites]
        self._plan: SegmentPlan | None = None
        self._shrink, self._delta, self._add = lora_shrink, lora_delta, lora_add
        if self._device.type == "cuda":
            # Triton is not installed where there is no GPU to use it
            from kernels.lora_add_triton import lora_add_triton
            from kernels.lora_delta_triton import lora_delta_triton
            from kernels.lora_shrink_triton import lora_shrink_triton

            self._shrink, self._delta = lora_shrink_triton, lora_delta_triton
            self._add = lora_add_triton

    def _columns_of(self, layer: int, site: Site) -> SiteColumns:
        slices = self._layout.slices_of(layer, site)
        return site_columns([(part.col0, part.num_cols) for part in slices], self._device)

    def bind(self, slot: int, row: SlotRow | None) -> None:
        """Nothing beside the table itself."""

    def begin(self, segments: Sequence[Segment]) -> None:
        live = [segment for segment in segments if segment[2] >= 0]
        self._plan = self._plan_of(live) if live else None
        if live:
            row_slot = torch.full(self._row_slot.shape, -1, dtype=torch.int32)
            for first, rows, slot in live:
                row_slot[first : first + rows] = slot
            self._row_slot.copy_(row_slot)

    def _plan_of(self, live: Sequence[Segment]) -> SegmentPlan:
        rank_blocks = self._rows.rank_blocks.tolist()
        return plan_segments(live, self._capacity, rank_blocks, self._device)

    def add(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if self._plan is None:
            return
        is_outer = layer == NO_LAYER
        shape = (self._layout.outer_sites if is_outer else self._layout.sites)[site]
        first_entry = self._layout.entry(layer, shape.first_slice)
        shape_of_u = (num_splits(x.shape[1]), x.shape[0], shape.num_slices, self._rank)
        u = self._u[: math.prod(shape_of_u)].view(shape_of_u)
        table, delta = self._rows.table, torch.empty_like(y)
        columns = (self._outer_columns if is_outer else self._columns)[site]
        cell = self._layout.site_cell(layer, site)
        self._shrink(x, table, self._plan, first_entry, shape.num_slices, u)
        self._delta(u, table, self._plan, first_entry, columns, cell, delta)
        self._add(y, LoraDelta(delta, self._row_slot[: x.shape[0]], table, cell))
