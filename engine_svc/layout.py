"""Where an adapter's matrices lie: sites, slices, entries, blocks. Pure; all sides share it.

    site    a fused linear of the base model: qkv, o, gate_up, down (one of each a layer)
    slice   one target inside a site, or a part of its columns where 16 rows of B would not fit
            one page
    entry   (layer, slice) flattened: layer · num_slices + slice; one cell of the site table
    block   up to RANK_BLOCK rows of A or of rank-major B; never straddles a page
    table   rows of a whole matrix, one a token of the vocabulary, in runs of one page each

Entries and site cells of the layers come first, then those of the output head and the embeddings,
under the layer number NO_LAYER.

Offsets count OFFSET_UNIT bytes. In a packed file they are relative to the first page image; in the
site table they are absolute from the arena's base: page_ids[relative // page] · page +
relative % page. −1 is none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from loraplex.base_model import EMBEDDING, HEAD, NO_LAYER, BaseModelSpec

RANK_BLOCK = 16
OFFSET_UNIT = 16
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

#: site → its modules, in the order of the fused weight's rows
SITES: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


#: sites outside the layers, by index: their one module each
HEAD_SITE, EMBEDDING_SITE = range(2)
OUTER_SITES = (HEAD, EMBEDDING)

#: embeddings' Aᵀ [vocab_size, rank]; whole weights [vocab_size, hidden_size] of embeddings and head
TABLES = ("embedding_a", "embedding_weight", "head_weight")


@dataclass(frozen=True, slots=True)
class Slice:
    """Columns col0 … col0 + num_cols − 1 of a site's output; module_col0 is where they begin
    inside the module."""

    module: str
    site: int
    col0: int
    num_cols: int
    module_col0: int
    in_features: int


@dataclass(frozen=True, slots=True)
class Site:
    name: str
    in_features: int
    out_features: int
    first_slice: int
    num_slices: int
    #: the base's linear has a bias
    has_bias: bool = False


@dataclass(frozen=True)
class AdapterLayout:
    """The same for every adapter of one engine; `digest` names packed files.

    `outer_sites` and `outer_slices` are those of NO_LAYER; their numbers count from 0 again.
    """

    num_layers: int
    dtype: str
    page_bytes: int
    sites: tuple[Site, ...]
    slices: tuple[Slice, ...]
    outer_sites: tuple[Site, ...] = ()
    outer_slices: tuple[Slice, ...] = ()

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_entries(self) -> int:
        return self.num_layers * len(self.slices) + len(self.outer_slices)

    @property
    def num_site_cells(self) -> int:
        return self.num_layers * len(self.sites) + len(self.outer_sites)

    @property
    def embedding_entries(self) -> range:
        """Entries whose A is the table `embedding_a`, not blocks."""
        site = self.outer_sites[EMBEDDING_SITE]
        first = self.entry(NO_LAYER, site.first_slice)
        return range(first, first + site.num_slices)

    def entry(self, layer: int, slice_index: int) -> int:
        after = self.num_layers if layer == NO_LAYER else layer
        return after * len(self.slices) + slice_index

    def site_cell(self, layer: int, site_index: int) -> int:
        after = self.num_layers if layer == NO_LAYER else layer
        return after * len(self.sites) + site_index

    def site_of_cell(self, cell: int) -> tuple[int, Site]:
        """(layer or NO_LAYER, site) of a cell."""
        layer, site_index = divmod(cell, len(self.sites))
        if layer < self.num_layers:
            return layer, self.sites[site_index]
        return NO_LAYER, self.outer_sites[cell - self.num_layers * len(self.sites)]

    def slices_of(self, layer: int, site: Site) -> tuple[Slice, ...]:
        slices = self.outer_slices if layer == NO_LAYER else self.slices
        return slices[site.first_slice : site.first_slice + site.num_slices]

    def entries_of(self, layer: int, module: str) -> tuple[tuple[int, Slice], ...]:
        """The entries of one module, with their slices."""
        slices = self.outer_slices if layer == NO_LAYER else self.slices
        return tuple(
            (self.entry(layer, index), part)
            for index, part in enumerate(slices)
            if part.module == module
        )

    def table_rows_a_page(self, row_items: int) -> int:
        """Rows of a table in each run but the last; 0 when a row is larger than a page."""
        return self.page_bytes // (row_items * self.item_bytes)

    @cached_property
    def digest(self) -> str:
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def kv_page_bytes(base: BaseModelSpec, page_size: int, dtype: str) -> int:
    """Bytes of one arena page: page_size positions of all layers, [layer, k|v, position, kv_head,
    head_dim]."""
    return base.num_layers * 2 * page_size * base.kv_size * DTYPE_BYTES[dtype]


def smallest_page_size(base: BaseModelSpec, dtype: str, at_least: int = 16) -> int:
    """The smallest power of two of positions whose page holds one block of A of every module, ≥
    `at_least`."""
    widest = max(base.hidden_size, base.intermediate_size, base.q_size)
    needed = RANK_BLOCK * widest * DTYPE_BYTES[dtype]
    page_size = at_least
    while kv_page_bytes(base, page_size, dtype) < needed:
        page_size *= 2
    return page_size


def adapter_layout(base: BaseModelSpec, page_size: int, dtype: str) -> AdapterLayout:
    """Layout for one base model and page size. `page_size` must be ≥ `smallest_page_size`."""
    page_bytes = kv_page_bytes(base, page_size, dtype)
    max_cols = page_bytes // (RANK_BLOCK * DTYPE_BYTES[dtype]) // OFFSET_UNIT * OFFSET_UNIT
    sites, slices = _sites(base, SITES, max_cols)
    outer = {module: (module,) for module in OUTER_SITES}
    outer_sites, outer_slices = _sites(base, outer, max_cols)
    return AdapterLayout(
        base.num_layers, dtype, page_bytes, sites, slices, outer_sites, outer_slices
    )


def _sites(
    base: BaseModelSpec, modules_of: Mapping[str, tuple[str, ...]], max_cols: int
) -> tuple[tuple[Site, ...], tuple[Slice, ...]]:
    sites: list[Site] = []
    slices: list[Slice] = []
    for site_index, (name, modules) in enumerate(modules_of.items()):
        first, col0 = len(slices), 0
        in_features = base.module_shape(modules[0])[0]
        for module in modules:
            out_features = base.module_shape(module)[1]
            for start in range(0, out_features, max_cols):
                cols = min(max_cols, out_features - start)
                slices.append(Slice(module, site_index, col0 + start, cols, start, in_features))
            col0 += out_features
        has_bias = base.module_bias(modules[0])
        num_slices = len(slices) - first
        sites.append(Site(name, in_features, col0, first, num_slices, has_bias))
    return tuple(sites), tuple(slices)
