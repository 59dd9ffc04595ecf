"""The site table on the device: which blocks of the arena are an adapter's matrices. One row a
slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.layout import (
    EMBEDDING_SITE,
    HEAD_SITE,
    OFFSET_UNIT,
    RANK_BLOCK,
    TABLES,
    AdapterLayout,
)
from engine_svc.model.gpu.cuda import new_event
from engine_svc.packed import PackedFileInvalid, PackedHeader
from kernels.lora_tables import SiteTable
from loraplex.base_model import NO_LAYER

Offsets = npt.NDArray[np.int64]

#: tensors of a SiteTable that have one row a slot
_ROW_TENSORS = ("a_off", "b_off", "rank", "scale", "g_off", "c_off", "live")
#: rows that may be on their way to a GPU before a binding waits
_STAGED_ROWS = 16


@dataclass(frozen=True)
class SlotRow:
    """One row of the table, ready to be written: offsets are absolute, in OFFSET_UNIT."""

    digest: str
    rank: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32]
    a_off: Offsets
    b_off: Offsets
    g_off: Offsets
    c_off: Offsets
    #: by name of layout.TABLES: runs of rows, none = no such table
    tables: Mapping[str, Offsets]


def slot_row(header: PackedHeader, page_ids: Sequence[int], layout: AdapterLayout) -> SlotRow:
    """The row of an adapter whose page images lie in these pages.

    Raises: PackedFileInvalid when the arrays do not fit the layout or an offset leaves its pages.
    """
    entries, cells = layout.num_entries, layout.num_site_cells
    shapes = {
        "rank": (entries,), "scale": (entries,), "g_off": (cells,), "c_off": (cells,),
        "raw": (entries,),
        "a_off": (entries, header.rank_blocks), "b_off": (entries, header.rank_blocks),
    }  # fmt: skip
    for name, shape in shapes.items():
        array = header.arrays.get(name)
        if array is None or array.shape != shape:
            actual = "missing" if array is None else array.shape
            raise PackedFileInvalid(f"array {name} is {actual}, expected {shape}")
    rank = np.array(header.arrays["rank"], dtype=np.int32)
    _check_blocks(rank, header.arrays, layout)
    _check_tables(rank, header.arrays, layout)
    units = layout.page_bytes // OFFSET_UNIT
    pages = np.asarray(page_ids, dtype=np.int64)

    def absolute(name: str) -> Offsets:
        relative = np.array(header.arrays[name], dtype=np.int64)
        if relative.size and (relative.min() < -1 or relative.max() >= units * len(pages)):
            raise PackedFileInvalid(f"{name} points outside {len(pages)} pages")
        if not len(pages):
            return relative
        there = pages[np.maximum(relative, 0) // units] * units + relative % units
        return np.where(relative < 0, -1, there)

    scale = np.array(header.arrays["scale"], dtype=np.float32)
    a_off, b_off, g_off, c_off = map(absolute, ("a_off", "b_off", "g_off", "c_off"))
    tables = {name: absolute(f"{name}_off") for name in TABLES}
    return SlotRow(header.digest, rank, scale, a_off, b_off, g_off, c_off, tables)


def _check_blocks(
    rank: npt.NDArray[np.int32],
    arrays: Mapping[str, npt.NDArray[np.generic]],
    layout: AdapterLayout,
) -> None:
    """Every block of a true rank is there, and none beyond it; an embedding's A has none."""
    with_a = rank.copy()
    with_a[layout.embedding_entries] = 0
    for name, ranks in (("a_off", with_a), ("b_off", rank)):
        there = np.asarray(arrays[name]) >= 0
        blocks = np.arange(there.shape[1]) * RANK_BLOCK < ranks[:, None]
        if (
            not np.array_equal(there, blocks)
            or int(rank.max(initial=0)) > RANK_BLOCK * there.shape[1]
        ):
            raise PackedFileInvalid(f"{name} does not have one block for each {RANK_BLOCK} ranks")


def _check_tables(
    rank: npt.NDArray[np.int32],
    arrays: Mapping[str, npt.NDArray[np.generic]],
    layout: AdapterLayout,
) -> None:
    """A table has all of its runs or none; an embedding of a true rank has its A."""
    head, embedding = (layout.outer_sites[index] for index in (HEAD_SITE, EMBEDDING_SITE))
    embedding_rank = int(rank[layout.embedding_entries[0]])
    items = {
        "embedding_a": embedding_rank,
        "embedding_weight": embedding.out_features,
        "head_weight": head.in_features,
    }
    for name, row_items in items.items():
        array = arrays.get(f"{name}_off")
        step = layout.table_rows_a_page(row_items) if row_items else 0
        whole = -(-embedding.in_features // step) if step else 0
        allowed = (whole,) if name == "embedding_a" else (0, whole)
        if array is None or array.ndim != 1 or len(array) not in allowed:
            raise PackedFileInvalid(f"table {name} does not have {whole} runs")
        if array.size and int(np.asarray(array).min()) < 0:
            raise PackedFileInvalid(f"table {name} has a run that lies nowhere")


class SiteTableRows:
    """Owns the device tensors of the table; rows are written at slot bindings, in plan order.

    A row is filled in page-locked memory and copied on the current stream, so that a binding does
    not wait for the device.
    """

    def __init__(
        self, arena_bytes: torch.Tensor, layout: AdapterLayout, num_slots: int, max_rank: int
    ) -> None:
        device, blocks = arena_bytes.device, -(-max_rank // RANK_BLOCK)
        entries, cells = layout.num_entries, layout.num_site_cells

        def offsets(*shape: int) -> torch.Tensor:
            return torch.full((num_slots, *shape), -1, dtype=torch.int64, device=device)

        self.table = SiteTable(
            arena=arena_bytes,
            a_off=offsets(entries, blocks),
            b_off=offsets(entries, blocks),
            rank=torch.zeros((num_slots, entries), dtype=torch.int32, device=device),
            scale=torch.zeros((num_slots, entries), dtype=torch.float32, device=device),
            g_off=offsets(cells),
            c_off=offsets(cells),
            live=torch.zeros((num_slots, cells), dtype=torch.uint8, device=device),
        )
        self.max_rank = max_rank
        #: [num_slots], the most rank blocks that a slice of the slot has; on the host
        self.rank_blocks = np.zeros(num_slots, dtype=np.int64)
        self._first_entries = _first_entries(layout)
        self._digests = [""] * num_slots
        on_gpu = device.type == "cuda"
        self._staged = [
            {
                name: torch.empty_like(getattr(self.table, name)[0], device="cpu").pin_memory()
                if on_gpu
                else torch.empty_like(getattr(self.table, name)[0])
                for name in _ROW_TENSORS
            }
            for _ in range(_STAGED_ROWS if on_gpu else 1)
        ]
        self._copied = [new_event() for _ in self._staged] if on_gpu else []
        self._next = 0

    @property
    def num_bytes(self) -> int:
        return sum(int(getattr(self.table, name).nbytes) for name in _ROW_TENSORS)

    def digest(self, slot: int) -> str:
        """What the slot holds; "" = nothing."""
        return self._digests[slot]

    def write(self, slot: int, row: SlotRow) -> None:
        """Make a slot hold an adapter. Blocks beyond its rank are −1."""
        staged = self._acquire()
        blocks = row.a_off.shape[1]
        for name in ("a_off", "b_off"):
            staged[name].fill_(-1)
            staged[name][:, :blocks] = torch.from_numpy(getattr(row, name))
        for name in ("rank", "scale", "g_off", "c_off"):
            staged[name].copy_(torch.from_numpy(getattr(row, name)))
        has_rank = np.logical_or.reduceat(row.rank > 0, self._first_entries)
        live = (has_rank | (row.c_off >= 0)).astype(np.uint8)
        staged["live"].copy_(torch.from_numpy(live))
        self._send(slot, staged)
        self._digests[slot] = row.digest
        self.rank_blocks[slot] = -(-int(row.rank.max(initial=0)) // RANK_BLOCK)

    def clear(self, slot: int) -> None:
        """Poison a row: no offsets, no ranks."""
        staged = self._acquire()
        for name, tensor in staged.items():
            tensor.fill_(-1 if name.endswith("_off") else 0)
        self._send(slot, staged)
        self._digests[slot] = ""
        self.rank_blocks[slot] = 0

    def _acquire(self) -> dict[str, torch.Tensor]:
        if self._copied:
            self._copied[self._next].synchronize()
        return self._staged[self._next]

    def _send(self, slot: int, staged: dict[str, torch.Tensor]) -> None:
        for name, tensor in staged.items():
            getattr(self.table, name)[slot].copy_(tensor, non_blocking=True)
        if self._copied:
            self._copied[self._next].record()
        self._next = (self._next + 1) % len(self._staged)


def _first_entries(layout: AdapterLayout) -> npt.NDArray[np.int64]:
    """The first entry of each cell's slices, by cell; cells follow each other as entries do."""
    layers = range(layout.num_layers)
    at = [layout.entry(layer, site.first_slice) for layer in layers for site in layout.sites]
    at += [layout.entry(NO_LAYER, site.first_slice) for site in layout.outer_sites]
    return np.array(at, dtype=np.int64)
