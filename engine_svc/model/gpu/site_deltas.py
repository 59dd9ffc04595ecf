"""What adapters add to a site's output, computed beside the base's GEMM and added by its
consumer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.layout import RANK_BLOCK, AdapterLayout, Site
from engine_svc.model.gpu.branch import Branch
from engine_svc.model.site_table import SiteTableRows
from kernels.lora_delta import lora_delta
from kernels.lora_shrink import lora_shrink
from kernels.lora_site_tuning import site_tuning
from kernels.lora_tables import (
    PREFILL_TILE_ROWS,
    TILE_ROWS,
    LoraDelta,
    SegmentPlan,
    SiteColumns,
    site_columns,
)
from kernels.lora_tuning import num_splits

Launch = Callable[..., Any]
#: padded rows up to which work items may be short; partial sums of more would take much memory
SHORT_STEP_ROWS = 2048
#: what long work items cost of their own, and each of them, in short ones; all count once for each
#: rank block. One layer of the 8B shape on an H200 (commit 2915d69), short and long, µs: 1024 rows
#: of two prompts 87 and 132 (rank 16), 348 and 231 (rank 64); of 16 prompts 93 and 145; of 64
#: decodes beside a prompt, ranks 8/16/64, 175 and 287; 512 rows of two prompts 48 and 107
LONG_START, LONG_ITEM = 74, 3


def captured_tile_rows(padded: int) -> int:
    """Rows of a work item in a captured step: short, as decodes need them, whatever it holds."""
    return TILE_ROWS if padded <= SHORT_STEP_ROWS else PREFILL_TILE_ROWS


def lora_tile_rows(
    padded: int, segment_rows: npt.NDArray[np.int64], rank_blocks: npt.NDArray[np.int64]
) -> int:
    """Rows of a work item in a step that need not be replayed. Args: segment_rows [n] of the
    adapters in it, and the rank blocks [n] that they have."""
    if padded > SHORT_STEP_ROWS:
        return PREFILL_TILE_ROWS
    short, long = (
        int((-(-segment_rows // size) * rank_blocks).sum())
        for size in (TILE_ROWS, PREFILL_TILE_ROWS)
    )
    return TILE_ROWS if short <= LONG_START + LONG_ITEM * long else PREFILL_TILE_ROWS


def most_lora_tiles(rows: int, num_slots: int) -> int:
    """Work items of any step of up to so many rows: short steps have the shorter ones."""
    short = min(rows, SHORT_STEP_ROWS)
    return max(
        short // TILE_ROWS + min(short, num_slots), rows // PREFILL_TILE_ROWS + min(rows, num_slots)
    )


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of one step: which rows are whose. row_slot [T] int32, −1 = none."""

    plan: SegmentPlan
    row_slot: torch.Tensor


class SiteDeltas:
    """Shrink and expand of the layers' sites, through the site table."""

    def __init__(self, rows: SiteTableRows, layout: AdapterLayout, max_rows: int) -> None:
        device = rows.table.arena.device
        self._table, self._layout = rows.table, layout
        self._rank = -(-rows.max_rank // RANK_BLOCK) * RANK_BLOCK
        sizes = ((min(max_rows, SHORT_STEP_ROWS), TILE_ROWS), (max_rows, PREFILL_TILE_ROWS))
        longest = max(
            num_rows * self._partials(site, tile_rows)
            for num_rows, tile_rows in sizes
            for site in layout.sites
        )
        self._u = torch.empty(longest, device=device)
        self._branch = Branch(device)
        self._shrink: Launch = lora_shrink
        self._delta: Launch = lora_delta
        if device.type == "cuda":
            # Triton is not installed where there is no GPU to use it
            from kernels.lora_delta_triton import lora_delta_triton
            from kernels.lora_shrink_triton import lora_shrink_triton

            self._shrink, self._delta = lora_shrink_triton, lora_delta_triton
        self._columns: list[SiteColumns] = [
            site_columns([(p.col0, p.num_cols) for p in layout.slices_of(0, site)], device)
            for site in layout.sites
        ]

    @property
    def num_bytes(self) -> int:
        return self._u.nbytes

    def _tuned(self, tuning: object) -> tuple[object, ...]:
        """One more argument of the kernels, which their references do not have."""
        return (tuning,) if self._table.arena.is_cuda else ()

    def _partials(self, site: Site, tile_rows: int) -> int:
        """Numbers of u a row."""
        parts = num_splits(site.in_features, tile_rows)
        return parts * site.num_slices * self._rank

    def beside(
        self,
        gemm: Callable[[], None],
        layer: int,
        site: int,
        x: torch.Tensor,
        step: StepAdapters,
        delta: torch.Tensor,
    ) -> LoraDelta:
        """Run the base's GEMM of a site and what its adapters add, in the order that is tuned.

        Args: x [T, in_features]; delta [T, out_features], written on the rows of adapters that
        are live at the site."""
        shape = self._layout.sites[site]
        first_entry = self._layout.entry(layer, shape.first_slice)
        cell = self._layout.site_cell(layer, site)
        rows, slices = x.shape[0], shape.num_slices
        tile_rows = step.plan.tile_rows
        size = rows * self._partials(shape, tile_rows)
        u = self._u[:size].view(-1, rows, slices, self._rank)
        tuning = site_tuning(shape.in_features, delta.shape[1], rows, tile_rows)

        def shrink() -> None:
            arguments = (x, self._table, step.plan, first_entry, shape.num_slices, u)
            self._shrink(*arguments, *self._tuned(tuning.shrink))

        def expand() -> None:
            columns = self._columns[site]
            arguments = (u, self._table, step.plan, first_entry, columns, cell, delta)
            self._delta(*arguments, *self._tuned(tuning.delta))

        self._branch.run(tuning, shrink, expand, gemm)
        return LoraDelta(delta, step.row_slot, self._table, cell)
