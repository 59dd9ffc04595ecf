"""Adapters on the vocabulary's two sides: embeddings of a segment, output head of a row.

LoRA on the head goes through StepLora, as in the layers; here are the tables of one row a token,
and the embeddings' low rank part, whose A is looked up instead of multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine_svc.layout import (
    EMBEDDING_SITE,
    HEAD_SITE,
    OFFSET_UNIT,
    RANK_BLOCK,
    AdapterLayout,
)
from engine_svc.model.linear import Linear
from engine_svc.model.lora import Segment, StepLora
from engine_svc.model.site_table import Offsets, SlotRow
from loraplex.base_model import NO_LAYER

#: rows that are looked up in an adapter's tables at one time: each takes 8 bytes a number for the
#: places of its numbers, beside the numbers themselves
EMBED_ROWS = 256


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows of one matrix in the arena. `starts` [runs] counts numbers, on the device."""

    starts: torch.Tensor
    rows_a_run: int
    row_items: int

    def rows(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] → [n, row_items]."""
        first = self.starts.index_select(0, ids // self.rows_a_run)
        first = first + ids % self.rows_a_run * self.row_items
        items = torch.arange(self.row_items, device=ids.device)
        return numbers.index_select(0, (first.unsqueeze(1) + items).view(-1)).view(len(ids), -1)


@dataclass(frozen=True, slots=True)
class _Expand:
    """Ranks r0 … of one block of B [rows, cols], added at column col0."""

    r0: int
    b: torch.Tensor
    col0: int


@dataclass(frozen=True, slots=True)
class _SlotVocabulary:
    """What one adapter brings. `head` are runs of the head's rows, side by side ones joined."""

    weight: _Table | None
    a: _Table | None
    expands: tuple[_Expand, ...]
    scale: float
    #: of the embeddings, [C] fp32: DoRA's
    gain: torch.Tensor | None
    head: tuple[torch.Tensor, ...]
    has_head_lora: bool


def table_rows(
    numbers: torch.Tensor, layout: AdapterLayout, runs: Offsets, num_rows: int, row_items: int
) -> tuple[torch.Tensor, ...]:
    """A table's runs as [rows, row_items] views; those that touch in the arena are one."""
    step, unit_items = layout.table_rows_a_page(row_items), OFFSET_UNIT // numbers.itemsize
    joined: list[tuple[int, int]] = []  # (first number, rows)
    for index, start in enumerate((runs * unit_items).tolist()):
        rows = min(step, num_rows - index * step)
        if joined and joined[-1][0] + joined[-1][1] * row_items == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + rows)
        else:
            joined.append((start, rows))
    return tuple(
        numbers[start : start + rows * row_items].view(rows, row_items) for start, rows in joined
    )


class AdapterVocabulary:
    """Views of the arena by slot, made when a slot is bound."""

    def __init__(
        self,
        numbers: torch.Tensor,
        layout: AdapterLayout,
        vocab_size: int,
        lora: StepLora,
        num_slots: int,
    ) -> None:
        """Args: numbers, the arena in the compute dtype, one dimension."""
        self._numbers, self._layout, self._vocab_size = numbers, layout, vocab_size
        self._lora = lora
        self._slots: list[_SlotVocabulary | None] = [None] * num_slots
        self._unit_items = OFFSET_UNIT // numbers.itemsize

    def bind(self, slot: int, row: SlotRow | None) -> None:
        """The slot holds another adapter from now on, or none."""
        self._slots[slot] = None if row is None else self._views(row)

    def brings(self, slot: int) -> bool:
        """The slot's adapter changes embeddings or output head."""
        return self._slots[slot] is not None

    def embed(self, segments: Sequence[Segment], ids: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, C] holds the base's embeddings of ids [T]; changed on the rows of adapters."""
        for first, count, slot in segments:
            own = self._slots[slot] if slot >= 0 else None
            if own is None:
                continue
            for begin in range(first, first + count, EMBED_ROWS):
                rows = slice(begin, min(begin + EMBED_ROWS, first + count))
                self._embed(own, ids[rows], out[rows])

    def _embed(self, own: _SlotVocabulary, ids: torch.Tensor, out: torch.Tensor) -> None:
        """out [n, C] of one adapter's rows, changed in place."""
        if own.weight is not None:
            out.copy_(own.weight.rows(self._numbers, ids))
        if own.a is None:
            return
        u = own.a.rows(self._numbers, ids).float() * own.scale  # [n, rank]
        total = out.float()
        if own.gain is not None:
            total *= own.gain
        for part in own.expands:
            ranks, columns = part.b.shape
            total[:, part.col0 : part.col0 + columns].addmm_(
                u[:, part.r0 : part.r0 + ranks], part.b.float()
            )
        out.copy_(total)

    def logits(
        self, head: Linear, hidden: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """[n, C] → [n, V], each row by its adapter's head: its own weights or the base's, and
        LoRA."""
        slots = [self._slots[slot] if slot >= 0 else None for _, _, slot in segments]
        if any(own is not None and own.head for own in slots):
            y = self._grouped(head, hidden, segments)
        else:
            y = head(hidden)
        live = [
            segment
            for segment, own in zip(segments, slots, strict=True)
            if own is not None and own.has_head_lora
        ]
        if live:
            self._lora.begin(live)
            self._lora.add(NO_LAYER, HEAD_SITE, hidden, y)
        return y

    def _grouped(
        self, head: Linear, hidden: torch.Tensor, segments: Sequence[Segment]
    ) -> torch.Tensor:
        """Rows grouped by head: one product for all rows of the base's, one for each other."""
        y = hidden.new_empty((hidden.shape[0], self._vocab_size))
        base_rows: list[int] = []
        for first, count, slot in segments:
            own = self._slots[slot] if slot >= 0 else None
            if own is None or not own.head:
                base_rows.extend(range(first, first + count))
                continue
            x, done = hidden[first : first + count], 0
            for run in own.head:
                y[first : first + count, done : done + len(run)] = F.linear(x, run)
                done += len(run)
        if base_rows:
            at = torch.tensor(base_rows, device=hidden.device)
            y.index_copy_(0, at, head(hidden.index_select(0, at)))
        return y

    def _views(self, row: SlotRow) -> _SlotVocabulary | None:
        layout = self._layout
        head_site = layout.outer_sites[HEAD_SITE]
        head_entry = layout.entry(NO_LAYER, head_site.first_slice)
        entries = layout.embedding_entries
        rank, scale = int(row.rank[entries[0]]), float(row.scale[entries[0]])
        hidden = layout.outer_sites[EMBEDDING_SITE].out_features
        tables = row.tables
        own = _SlotVocabulary(
            weight=self._table(tables["embedding_weight"], hidden),
            a=self._table(tables["embedding_a"], rank),
            expands=tuple(self._expands(row, rank)),
            scale=scale,
            gain=self._gain(int(row.g_off[layout.site_cell(NO_LAYER, EMBEDDING_SITE)]), hidden),
            head=self._head(tables["head_weight"], hidden),
            has_head_lora=int(row.rank[head_entry]) > 0,
        )
        brings = own.weight is not None or own.a is not None or own.head or own.has_head_lora
        return own if brings else None

    def _table(self, runs: Offsets, row_items: int) -> _Table | None:
        if not len(runs):
            return None
        starts = torch.from_numpy(runs * self._unit_items).to(self._numbers.device)
        return _Table(starts, self._layout.table_rows_a_page(row_items), row_items)

    def _gain(self, offset: int, hidden: int) -> torch.Tensor | None:
        if offset < 0:
            return None
        start = offset * self._unit_items
        items = hidden * torch.float32.itemsize // self._numbers.itemsize
        return self._numbers[start : start + items].view(torch.float32)

    def _head(self, runs: Offsets, hidden: int) -> tuple[torch.Tensor, ...]:
        return table_rows(self._numbers, self._layout, runs, self._vocab_size, hidden)

    def _expands(self, row: SlotRow, rank: int) -> list[_Expand]:
        layout, found = self._layout, []
        slices = layout.slices_of(NO_LAYER, layout.outer_sites[EMBEDDING_SITE])
        for entry, part in zip(layout.embedding_entries, slices, strict=True):
            for block in range(-(-rank // RANK_BLOCK)):
                r0 = block * RANK_BLOCK
                rows = min(RANK_BLOCK, rank - r0)
                start = int(row.b_off[entry, block]) * self._unit_items
                b = self._numbers[start : start + rows * part.num_cols].view(rows, part.num_cols)
                found.append(_Expand(r0, b, part.col0))
        return found
