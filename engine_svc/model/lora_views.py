"""LoRA on a CPU in fp32: the arena's blocks as cached tensor views.

Blocks that lie side by side are one matrix, so a site of one adapter is usually one shrink and one
expand a slice, each a single call. The kernels' references give the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_svc.layout import HEAD_SITE, OFFSET_UNIT, RANK_BLOCK, AdapterLayout, Site
from engine_svc.model.lora import Segment
from engine_svc.model.site_table import Offsets, SlotRow
from loraplex.base_model import NO_LAYER


@dataclass(frozen=True, slots=True)
class _Expand:
    """y[:, col0 : col1] += scale · u[:, r0 : r1] · b, b [r1 − r0, col1 − col0]."""

    r0: int
    r1: int
    b: torch.Tensor
    col0: int
    col1: int
    scale: float


@dataclass(frozen=True, slots=True)
class _SiteViews:
    """One adapter at one site. `shrinks` are [in_features, rows] views, side by side in u."""

    shrinks: tuple[torch.Tensor, ...]
    expands: tuple[_Expand, ...]
    gain: torch.Tensor | None
    constant: torch.Tensor | None


class ViewLora:
    """Cached views of the arena, fp32 on a CPU."""

    def __init__(self, numbers: torch.Tensor, layout: AdapterLayout, num_slots: int) -> None:
        """Args: numbers, the arena as fp32, one dimension."""
        self._numbers, self._layout = numbers, layout
        self._views: list[list[_SiteViews | None]] = [[] for _ in range(num_slots)]
        self._live: list[tuple[int, int, list[_SiteViews | None]]] = []

    def bind(self, slot: int, row: SlotRow | None) -> None:
        layout = self._layout
        layers = [(layer, site) for layer in range(layout.num_layers) for site in layout.sites]
        head = (NO_LAYER, layout.outer_sites[HEAD_SITE])
        # one a site cell, but for the embeddings: vocabulary.py adds those
        self._views[slot] = (
            []
            if row is None
            else [self._site(row, cell, *at) for cell, at in enumerate((*layers, head))]
        )

    def begin(self, segments: Sequence[Segment]) -> None:
        self._live = [
            (first, first + rows, self._views[slot]) for first, rows, slot in segments if slot >= 0
        ]

    def add(self, layer: int, site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        cell = self._layout.site_cell(layer, site)
        for first, end, views in self._live:
            view = views[cell]
            if view is not None:
                _add_site(view, x[first:end], y[first:end])

    def _site(self, row: SlotRow, cell: int, layer: int, site: Site) -> _SiteViews | None:
        shrinks: list[tuple[int, int]] = []  # (offset in numbers, rows)
        expands: list[_Expand] = []
        shared: dict[bytes, int] = {}  # an A → its first row of u
        num_rows = 0
        for index, part in enumerate(self._layout.slices_of(layer, site), site.first_slice):
            entry = self._layout.entry(layer, index)
            rank, scale = int(row.rank[entry]), float(row.scale[entry])
            a_off = row.a_off[entry]
            u_rows = shared.setdefault(a_off.tobytes(), num_rows)
            if u_rows == num_rows:
                _extend(shrinks, a_off, rank, site.in_features)
                num_rows += rank
            blocks: list[tuple[int, int]] = []
            _extend(blocks, row.b_off[entry], rank, part.num_cols)
            for offset, rows in blocks:
                b = self._view(offset, rows, part.num_cols)
                columns = (part.col0, part.col0 + part.num_cols)
                expands.append(_Expand(u_rows, u_rows + rows, b, *columns, scale))
                u_rows += rows
        gain = self._vector(int(row.g_off[cell]), site.out_features)
        constant = self._vector(int(row.c_off[cell]), site.out_features)
        if not expands and gain is None and constant is None:
            return None
        views = tuple(self._view(offset, rows, site.in_features).T for offset, rows in shrinks)
        return _SiteViews(views, tuple(expands), gain, constant)

    def _view(self, offset: int, rows: int, cols: int) -> torch.Tensor:
        return self._numbers[offset : offset + rows * cols].view(rows, cols)

    def _vector(self, offset: int, size: int) -> torch.Tensor | None:
        start = offset * (OFFSET_UNIT // self._numbers.itemsize)
        return self._numbers[start : start + size] if offset >= 0 else None


def _extend(runs: list[tuple[int, int]], offsets: Offsets, rank: int, cols: int) -> None:
    """Append an entry's blocks as (offset in fp32 numbers, rows), joined to the run before where
    they touch."""
    for block in range(-(-rank // RANK_BLOCK)):
        offset = int(offsets[block]) * (OFFSET_UNIT // torch.float32.itemsize)
        rows = min(RANK_BLOCK, rank - block * RANK_BLOCK)
        if runs and runs[-1][0] + runs[-1][1] * cols == offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + rows)
        else:
            runs.append((offset, rows))


def _add_site(site: _SiteViews, x: torch.Tensor, y: torch.Tensor) -> None:
    if site.gain is not None:
        y.mul_(site.gain)
    if site.constant is not None:
        y.add_(site.constant)
    if not site.expands:
        return
    if len(site.shrinks) == 1:
        u = torch.mm(x, site.shrinks[0])
    else:
        u = torch.cat([torch.mm(x, a) for a in site.shrinks], dim=1)
    for part in site.expands:
        y[:, part.col0 : part.col1].addmm_(u[:, part.r0 : part.r1], part.b, alpha=part.scale)
