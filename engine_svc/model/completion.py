"""What only the base's weights can add to a loaded adapter: DoRA's gains, and biases that replace.

Runs on the slot writer's thread, in pages that no step reads yet. Per output row, in fp32:

    g = m / ‖W₀ + s·B·A‖        B ← g ⊙ B        c ← b_adapter − g ⊙ b_base

so that the epilogue y ← g ⊙ y + c + B·u needs neither a norm nor the base's output without its
bias.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.layout import HEAD_SITE, OFFSET_UNIT, RANK_BLOCK, TABLES, AdapterLayout, Site, Slice
from engine_svc.model.arena import Arena
from engine_svc.model.site_table import Offsets, SlotRow
from engine_svc.model.vocabulary import table_rows
from engine_svc.model.weights import ModelWeights
from engine_svc.packed import RAW_BIAS, RAW_MAGNITUDE
from loraplex.base_model import NO_LAYER
from loraplex.status import AdapterRefused

#: of W₀ + s·B·A that exist at one time
CHUNK_BYTES = 8 << 20
#: of tensors of up to 1 MiB that exist at one time: vectors, blocks of B, A and B of small ranks
SMALL_BYTES = 8 << 20
#: the largest rank that an adapter may have
MAX_RANK = 256
#: of gains that are kept for adapters that come back
CACHE_BYTES = 64 << 20
#: seconds of rest after each second of norms: steps run on the same cores
REST = 1.0

Gains = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _SiteWeight:
    """W₀ of a site, [out_features, in_features], made when it is needed, and its bias."""

    plain: Callable[[], torch.Tensor]
    bias: torch.Tensor | None = None


class Completion:
    """Finishes site table rows whose packed file says `raw`; the base's weights never change."""

    def __init__(
        self,
        weights: ModelWeights,
        arena: Arena,
        layout: AdapterLayout,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self._weights, self._arena, self._layout = weights, arena, layout
        self._rest = rest
        #: adapter digest → entry → gain, in host memory; the base's digest is this process's
        self._cache: OrderedDict[str, Gains] = OrderedDict()

    @property
    def workspace_bytes(self) -> int:
        """Device memory that `complete` may hold at one time, but for whole vocabularies: parts of
        W₀ + s·B·A, and A and B of the widest slice in fp32."""
        sites = self._layout.sites
        longest = max(site.in_features for site in sites)
        widest = max(site.out_features for site in sites)
        return 4 * CHUNK_BYTES + 4 * MAX_RANK * (longest + widest)

    def rehearse(self) -> None:
        """Complete an adapter that does not exist, at every site of the first layer, in the arena's
        first pages, which then hold anything: so that what the device loads and keeps for the first
        one is there."""
        pages = [self._arena.page(index) for index in range(min(2, self._arena.num_pages))]
        for page in pages:
            page.zero_()
        row, raw = _rehearsal(self._layout, len(pages))
        for _ in range(2):
            # the second time with the gains of the first; zeros have no direction in some bases
            with suppress(AdapterRefused):
                self.complete(row, raw)
        self._cache.pop(row.digest, None)

    @torch.no_grad()
    def complete(self, row: SlotRow, raw: npt.NDArray[np.int32]) -> None:
        """Write g, c and g ⊙ B of every slice that `raw` [E] marks, in the row's blocks.

        Raises: AdapterRefused WEIGHTS_NOT_FINITE when a row of W₀ + s·B·A has no length.
        """
        known = self._cache.get(row.digest)
        if known is not None:
            self._cache.move_to_end(row.digest)
        gains: Gains = {}
        for cell in range(self._layout.num_site_cells):
            layer, site = self._layout.site_of_cell(cell)
            slices = self._layout.slices_of(layer, site)
            first = self._layout.entry(layer, site.first_slice)
            marked = [(first + i, part) for i, part in enumerate(slices) if raw[first + i]]
            if marked:
                weight = self._weight(row, layer, cell, site)
                self._site(row, raw, cell, marked, weight, known, gains)
        if gains and known is None:
            self._keep(row.digest, gains)

    def _weight(self, row: SlotRow, layer: int, cell: int, site: Site) -> _SiteWeight:
        if layer != NO_LAYER:
            linear = self._weights.layers[layer].sites[cell % len(self._layout.sites)]
            return _SiteWeight(linear.plain_weight, linear.bias)
        # an adapter's own vocabulary takes the place of the base's
        is_head = site is self._layout.outer_sites[HEAD_SITE]
        runs = row.tables["head_weight" if is_head else "embedding_weight"]
        hidden = site.in_features if is_head else site.out_features
        tokens = site.out_features if is_head else site.in_features
        own = table_rows(self._arena.numbers, self._layout, runs, tokens, hidden)
        if is_head:
            return _SiteWeight(lambda: torch.cat(own) if own else self._weights.head.plain_weight())
        embedding = self._weights.embedding
        return _SiteWeight(lambda: (torch.cat(own) if own else embedding).T)

    def _site(
        self,
        row: SlotRow,
        raw: npt.NDArray[np.int32],
        cell: int,
        marked: list[tuple[int, Slice]],
        weight: _SiteWeight,
        known: Gains | None,
        gains: Gains,
    ) -> None:
        size = self._layout.site_of_cell(cell)[1].out_features
        gain = self._vector(int(row.g_off[cell]), size)
        constant = self._vector(int(row.c_off[cell]), size)
        assert weight.bias is None or constant is not None, "the packer gave no room for c"
        plain: torch.Tensor | None = None
        for entry, part in marked:
            columns = slice(part.col0, part.col0 + part.num_cols)
            g: torch.Tensor | float = 1.0
            if raw[entry] & RAW_MAGNITUDE:
                assert gain is not None, "the packer gave no room for g"
                if known is None:
                    plain = weight.plain() if plain is None else plain
                    g = self._gain(row, entry, plain[columns], gain[columns])
                    # gains of all entries would be much memory
                    gains[entry] = g.cpu()
                else:
                    g = known[entry].to(gain.device)
                gain[columns] = g
                for block in self._blocks(row.b_off[entry], int(row.rank[entry]), part.num_cols):
                    block.copy_(block.float() * g)
            if weight.bias is not None and constant is not None:
                bias = weight.bias[columns].float()
                own = bool(raw[entry] & RAW_BIAS)
                constant[columns] += -g * bias if own else (1.0 - g) * bias

    def _gain(
        self, row: SlotRow, entry: int, weight: torch.Tensor, magnitude: torch.Tensor
    ) -> torch.Tensor:
        """m / ‖W₀ + s·B·A‖ [num_cols] of one slice."""
        rank, scale = int(row.rank[entry]), float(row.scale[entry])
        num_cols, in_features = weight.shape
        a = self._a(row, entry, rank, in_features)
        b = self._matrix(row.b_off[entry], rank, num_cols)
        norms = torch.empty_like(magnitude)
        step = max(1, CHUNK_BYTES // (4 * in_features))
        for first in range(0, num_cols, step):
            begun = time.perf_counter()
            rows = slice(first, first + step)
            total = torch.addmm(weight[rows].float(), b[:, rows].T, a, alpha=scale)
            norms[rows] = torch.linalg.vector_norm(total, dim=1)
            self._rest(REST * (time.perf_counter() - begun))
        gain = magnitude / norms
        if not bool(gain.isfinite().all()):
            raise AdapterRefused(
                f"adapter {row.digest}: a row of W₀ + s·B·A has no length, DoRA has no direction",
                reason="WEIGHTS_NOT_FINITE",
            )
        return gain

    def _a(self, row: SlotRow, entry: int, rank: int, in_features: int) -> torch.Tensor:
        """[rank, in_features] fp32; an embedding's is a table of one row a token."""
        if entry in self._layout.embedding_entries:
            runs = row.tables["embedding_a"]
            table = table_rows(self._arena.numbers, self._layout, runs, in_features, rank)
            return torch.cat([rows.float() for rows in table]).T
        return self._matrix(row.a_off[entry], rank, in_features)

    def _matrix(self, offsets: Offsets, rank: int, cols: int) -> torch.Tensor:
        """[rank, cols] fp32, a copy of an entry's blocks."""
        numbers = self._arena.numbers
        matrix = torch.empty(rank, cols, dtype=torch.float32, device=numbers.device)
        for index, block in enumerate(self._blocks(offsets, rank, cols)):
            matrix[index * RANK_BLOCK :][: len(block)] = block
        return matrix

    def _blocks(self, offsets: Offsets, rank: int, cols: int) -> Iterator[torch.Tensor]:
        """Views of an entry's blocks, [rows, cols] in the compute dtype."""
        numbers = self._arena.numbers
        for block in range(-(-rank // RANK_BLOCK)):
            rows = min(RANK_BLOCK, rank - block * RANK_BLOCK)
            start = int(offsets[block]) * (OFFSET_UNIT // numbers.itemsize)
            yield numbers[start : start + rows * cols].view(rows, cols)

    def _vector(self, offset: int, size: int) -> torch.Tensor | None:
        if offset < 0:
            return None
        start = offset * OFFSET_UNIT
        return self._arena.bytes[start : start + 4 * size].view(torch.float32)

    def _keep(self, digest: str, gains: Gains) -> None:
        self._cache[digest] = gains
        while len(self._cache) > 1 and self._cached_bytes() > CACHE_BYTES:
            self._cache.popitem(last=False)

    def _cached_bytes(self) -> int:
        return sum(gain.nbytes for gains in self._cache.values() for gain in gains.values())


def _rehearsal(layout: AdapterLayout, num_pages: int) -> tuple[SlotRow, npt.NDArray[np.int32]]:
    """A row of rank 16 at the sites of the first layer and what is raw of it: A, B and g at the
    arena's beginning, c in another page where there is one."""
    inner = np.arange(layout.num_entries) < len(layout.slices)
    offsets = np.where(inner, 0, -1).astype(np.int64)[:, None]
    cells = np.arange(layout.num_site_cells) < len(layout.sites)
    constants = layout.page_bytes // OFFSET_UNIT * (num_pages - 1)
    row = SlotRow(
        digest="rehearsal",
        rank=np.where(inner, RANK_BLOCK, 0).astype(np.int32),
        scale=np.ones(layout.num_entries, np.float32),
        a_off=offsets, b_off=offsets,
        g_off=np.where(cells, 0, -1).astype(np.int64),
        c_off=np.where(cells, constants, -1).astype(np.int64),
        tables=dict.fromkeys(TABLES, np.zeros(0, np.int64)),
    )  # fmt: skip
    return row, np.where(inner, RAW_MAGNITUDE | RAW_BIAS, 0).astype(np.int32)
