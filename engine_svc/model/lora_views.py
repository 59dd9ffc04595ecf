"""LoRA on a CPU in fp32: the arena's blocks as cached array views.

Blocks that lie side by side are one matrix, so a site of one adapter is usually one shrink and one
expand a slice, each a single call. The kernels' references give the same numbers.

A decode has a few rows an adapter, and then the price is that of the calls: NumPy's cost less than
half of torch's (docs/perf-log.md). Many rows go through torch, whose products are as fast and run
on its threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.layout import HEAD_SITE, OFFSET_UNIT, RANK_BLOCK, AdapterLayout, Site
from engine_svc.model.lora import Segment
from engine_svc.model.site_table import Offsets, SlotRow
from loraplex.base_model import NO_LAYER

Array = npt.NDArray[np.float32]

#: rows of one adapter up to which NumPy does the products
FEW_ROWS = 32


@dataclass(frozen=True, slots=True)
class _Expand:
    """y[:, col0 : col1] += u[:, r0 : r1] · b, b [r1 − r0, col1 − col0]."""

    r0: int
    r1: int
    b: Array
    col0: int
    col1: int


@dataclass(frozen=True, slots=True)
class _SiteViews:
    """One adapter at one site. `shrinks` are [in_features, rows] views, side by side in u;
    `scales` [rows of u] multiply u."""

    shrinks: tuple[Array, ...]
    scales: Array
    expands: tuple[_Expand, ...]
    gain: Array | None
    constant: Array | None


class ViewLora:
    """Cached views of the arena, fp32 on a CPU."""

    def __init__(self, numbers: torch.Tensor, layout: AdapterLayout, num_slots: int) -> None:
        """Args: numbers, the arena as fp32, one dimension."""
        self._numbers: Array = numbers.numpy()
        self._layout = layout
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
        if not self._live:
            return
        cell = self._layout.site_cell(layer, site)
        inputs, outputs = x.numpy(), y.numpy()
        for first, end, views in self._live:
            view = views[cell]
            if view is not None:
                _add_site(view, inputs[first:end], outputs[first:end])

    def _site(self, row: SlotRow, cell: int, layer: int, site: Site) -> _SiteViews | None:
        shrinks: list[tuple[int, int]] = []  # (offset in numbers, rows)
        expands: list[_Expand] = []
        shared: dict[bytes, int] = {}  # an A → its first row of u
        scales: list[float] = []
        for index, part in enumerate(self._layout.slices_of(layer, site), site.first_slice):
            entry = self._layout.entry(layer, index)
            rank, scale = int(row.rank[entry]), float(row.scale[entry])
            a_off = row.a_off[entry]
            u_rows = shared.setdefault(a_off.tobytes(), len(scales))
            if u_rows == len(scales):
                _extend(shrinks, a_off, rank, site.in_features)
                scales += [scale] * rank
            blocks: list[tuple[int, int]] = []
            _extend(blocks, row.b_off[entry], rank, part.num_cols)
            for offset, rows in blocks:
                b = self._view(offset, rows, part.num_cols)
                columns = (part.col0, part.col0 + part.num_cols)
                expands.append(_Expand(u_rows, u_rows + rows, b, *columns))
                u_rows += rows
        gain = self._vector(int(row.g_off[cell]), site.out_features)
        constant = self._vector(int(row.c_off[cell]), site.out_features)
        if not expands and gain is None and constant is None:
            return None
        views = tuple(self._view(offset, rows, site.in_features).T for offset, rows in shrinks)
        return _SiteViews(views, np.array(scales, np.float32), tuple(expands), gain, constant)

    def _view(self, offset: int, rows: int, cols: int) -> Array:
        return self._numbers[offset : offset + rows * cols].reshape(rows, cols)

    def _vector(self, offset: int, size: int) -> Array | None:
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


def _add_site(site: _SiteViews, x: Array, y: Array) -> None:
    if site.gain is not None:
        y *= site.gain
    if site.constant is not None:
        y += site.constant
    if not site.expands:
        return
    product = np.dot if len(x) <= FEW_ROWS else _torch_product
    parts = [product(x, a) for a in site.shrinks]
    u = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    u *= site.scales
    for part in site.expands:
        columns = y[:, part.col0 : part.col1]
        columns += product(u[:, part.r0 : part.r1], part.b)


def _torch_product(left: Array, right: Array) -> Array:
    product: Array = torch.mm(torch.from_numpy(left), torch.from_numpy(right)).numpy()
    return product
