"""Adapters that do not exist, for steps before serving: all of their matrices are the arena's first
bytes."""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from engine_svc.layout import HEAD_SITE, RANK_BLOCK, TABLES, AdapterLayout
from engine_svc.model.site_table import SlotRow


class Outer(enum.Enum):
    """What a synthetic adapter has outside the layers: nothing, LoRA of the output head, or all of
    a vocabulary of its own and LoRA of it."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    VOCABULARY = enum.auto()


def synthetic_row(
    layout: AdapterLayout, outer: Outer, vocab_size: int, rank_blocks: int = 1
) -> SlotRow:
    """An adapter of so many rank blocks at every site of the layers, all of which are the arena's
    first bytes: its numbers mean nothing. Args: vocab_size, of use with a vocabulary, which takes
    one rank block."""
    assert rank_blocks == 1 or outer is Outer.NOTHING
    entries, cells = layout.num_entries, layout.num_site_cells
    with_rank = np.arange(entries) < layout.num_layers * len(layout.slices)
    if outer is Outer.HEAD:
        with_rank[: layout.embedding_entries.start] = True
    elif outer is Outer.VOCABULARY:
        with_rank[:] = True
    offsets = np.repeat(np.where(with_rank, 0, -1).astype(np.int64)[:, None], rank_blocks, axis=1)
    none = np.full(cells, -1, np.int64)
    tables = dict.fromkeys(TABLES, np.zeros(0, np.int64))
    if outer is Outer.VOCABULARY:
        tables = {name: _first_page(layout, name, vocab_size) for name in TABLES}
    return SlotRow(
        digest="warm-up",
        rank=np.where(with_rank, rank_blocks * RANK_BLOCK, 0).astype(np.int32),
        scale=np.ones(entries, np.float32),
        a_off=offsets, b_off=offsets, g_off=none, c_off=none,
        tables=tables,
    )  # fmt: skip


def _first_page(layout: AdapterLayout, table: str, vocab_size: int) -> npt.NDArray[np.int64]:
    """All runs of a table at the arena's beginning; none where a row is larger than a page, as no
    adapter has such a table."""
    hidden = layout.outer_sites[HEAD_SITE].in_features
    rows = layout.table_rows_a_page(RANK_BLOCK if table == "embedding_a" else hidden)
    return np.zeros(-(-vocab_size // rows) if rows else 0, np.int64)
