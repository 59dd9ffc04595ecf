"""Turns checked LoRA tensors into the packed file of engine_svc/packed.py.

    plan_packing(targets, layout, …)   where blocks and tables go: sizes only, no weights are read
    write_packed(plan, weights, out)   header and page images into `out`

Blocks go first-fit, largest first, so that pages fill up. The A blocks of one site and layer (q, k
and v) stay adjacent where a page holds them, so that they can be read as one matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine_svc.adapters.convert import as_layout_bits
from engine_svc.adapters.row_tables import TableRun, plan_tables, write_run
from engine_svc.layout import OFFSET_UNIT, RANK_BLOCK, AdapterLayout
from engine_svc.packed import Array, encode_header
from loraplex.adapter_format import SavedModule, TargetSpec, TensorLocator
from loraplex.base_model import EMBEDDING
from loraplex.status import AdapterRefused

Bits = npt.NDArray[np.unsignedinteger]

_FILE_DTYPE = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Block:
    """Rows row0 … row0 + rows − 1 (ranks) of one matrix, written at byte `offset` of the images.

    For B, columns col0 … col0 + cols − 1 of the module's output.
    """

    target: int
    is_b: bool
    row0: int
    rows: int
    col0: int
    cols: int
    offset: int


@dataclass(frozen=True)
class PackPlan:
    targets: tuple[TargetSpec, ...]
    layout: AdapterLayout
    header: bytes
    blocks: tuple[Block, ...]
    runs: tuple[TableRun, ...]
    num_pages: int
    used_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the whole packed file."""
        return len(self.header) + self.num_pages * self.layout.page_bytes


def plan_packing(
    targets: Iterable[TargetSpec],
    layout: AdapterLayout,
    digest: str,
    saved: Iterable[SavedModule] = (),
) -> PackPlan:
    """Place every block and table: tables first, so that their full pages follow each other.

    Raises: AdapterRefused ADAPTER_TOO_LARGE when one block is larger than a page.
    """
    chosen = tuple(targets)
    num_blocks = max((_num_blocks(target.rank) for target in chosen), default=1)
    rank = np.zeros(layout.num_entries, np.int32)
    scale = np.zeros(layout.num_entries, np.float32)
    offsets = {
        False: np.full((layout.num_entries, num_blocks), -1, np.int64),
        True: np.full((layout.num_entries, num_blocks), -1, np.int64),
    }
    groups = _groups(chosen, layout)
    pages = _Pages(layout.page_bytes)
    runs, tables = plan_tables(chosen, saved, layout, pages.take)
    blocks: list[Block] = []
    for group in sorted(groups, key=lambda group: -group.num_bytes):
        for block in pages.place(group):
            blocks.append(block)
            target = chosen[block.target]
            for entry, part in layout.entries_of(target.layer, target.module):
                if block.is_b and part.module_col0 != block.col0:
                    continue
                rank[entry], scale[entry] = target.rank, target.scaling
                table = offsets[block.is_b]
                table[entry, block.row0 // RANK_BLOCK] = block.offset // OFFSET_UNIT
    used = sum(block.rows * block.cols for block in blocks) * layout.item_bytes
    used += sum(run.rows * run.row_items for run in runs) * layout.item_bytes
    arrays: dict[str, Array] = {
        "rank": rank,
        "scale": scale,
        "a_off": offsets[False],
        "b_off": offsets[True],
        "g_off": np.full(layout.num_site_cells, -1, np.int64),
        "c_off": np.full(layout.num_site_cells, -1, np.int64),
        **tables,
    }
    header = encode_header(digest, layout.digest, pages.count, used, arrays)
    return PackPlan(chosen, layout, header, tuple(blocks), runs, pages.count, used)


def write_packed(plan: PackPlan, weights: Path, out: memoryview) -> None:
    """Fill `out`, plan.num_bytes long; bytes between blocks become zero.

    Raises: AdapterRefused WEIGHTS_NOT_FINITE when a value does not fit the layout's dtype.
    """
    assert len(out) == plan.num_bytes, (len(out), plan.num_bytes)
    data = np.memmap(weights, np.uint8, "r")
    out[: len(plan.header)] = plan.header
    images = np.frombuffer(out, np.uint8)[len(plan.header) :]
    item_bytes = plan.layout.item_bytes
    bits = np.dtype(f"<u{item_bytes}")
    matrix: Bits | None = None
    current = (-1, False)
    end = 0
    taken = [(block.offset, block.rows * block.cols) for block in plan.blocks]
    taken += [(run.offset, run.rows * run.row_items) for run in plan.runs]
    for offset, items in sorted(taken):
        images[end:offset] = 0
        end = offset + items * item_bytes
    images[end:] = 0
    for tensor in {run.tensor: None for run in plan.runs}:
        matrix = _matrix(data, tensor, plan.layout.dtype)
        for run in (run for run in plan.runs if run.tensor == tensor):
            run_bytes = run.rows * run.row_items * item_bytes
            write_run(run, matrix, images[run.offset : run.offset + run_bytes].view(bits))
    for block in sorted(plan.blocks, key=lambda block: (block.target, block.is_b)):
        target = plan.targets[block.target]
        if matrix is None or current != (block.target, block.is_b):
            current = (block.target, block.is_b)
            matrix = _matrix(data, target.b if block.is_b else target.a, plan.layout.dtype)
        num_bytes = block.rows * block.cols * item_bytes
        place = images[block.offset : block.offset + num_bytes].view(bits)
        ranks = slice(block.row0, block.row0 + block.rows)
        if block.is_b:
            source = matrix[block.col0 : block.col0 + block.cols, ranks]
            place.reshape(block.rows, block.cols)[...] = source.T
        else:
            place.reshape(block.rows, block.cols)[...] = matrix[ranks]


@dataclass(slots=True)
class _Group:
    """Blocks that lie side by side, their offsets relative to the group's start."""

    blocks: list[Block]
    num_bytes: int

    def halves(self) -> list[_Group]:
        """One group a block."""
        return [
            _Group([_moved(block, -block.offset)], following - block.offset)
            for block, following in zip(
                self.blocks,
                [block.offset for block in self.blocks[1:]] + [self.num_bytes],
                strict=True,
            )
        ]


class _Pages:
    """Open pages with the bytes that are left in each."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._used: list[int] = []

    @property
    def count(self) -> int:
        return len(self._used)

    def place(self, group: _Group) -> Iterable[Block]:
        """The group's blocks at their final offsets; a group larger than a page is divided."""
        if group.num_bytes > self._page_bytes:
            if len(group.blocks) == 1:
                raise AdapterRefused(
                    f"a block of {group.num_bytes} bytes does not fit a page of "
                    f"{self._page_bytes}; raise --page-size",
                    reason="ADAPTER_TOO_LARGE",
                )
            for part in group.halves():
                yield from self.place(part)
            return
        start = self.take(group.num_bytes)
        for block in group.blocks:
            yield _moved(block, start)

    def take(self, num_bytes: int) -> int:
        """Byte offset in the images of a place for at most a page's bytes, in the first page that
        has it."""
        size = -(-num_bytes // OFFSET_UNIT) * OFFSET_UNIT
        pages = enumerate(self._used)
        page = next((i for i, used in pages if used + size <= self._page_bytes), len(self._used))
        if page == len(self._used):
            self._used.append(0)
        start = page * self._page_bytes + self._used[page]
        self._used[page] += size
        return start


def _groups(targets: tuple[TargetSpec, ...], layout: AdapterLayout) -> list[_Group]:
    """The A blocks of each (layer, site) together, every slice's B blocks by themselves."""
    groups: list[_Group] = []
    sites: dict[tuple[int, int], _Group] = {}
    for index, target in enumerate(targets):
        parts = [part for _, part in layout.entries_of(target.layer, target.module)]
        if target.module != EMBEDDING:
            site = sites.setdefault((target.layer, parts[0].site), _Group([], 0))
            _extend(site, layout, index, target.rank, parts[0].in_features, col0=0, is_b=False)
        for part in parts:
            group = _Group([], 0)
            _extend(
                group, layout, index, target.rank, part.num_cols, col0=part.module_col0, is_b=True
            )
            groups += group.halves()
    return [*sites.values(), *groups]


def _extend(
    group: _Group,
    layout: AdapterLayout,
    target: int,
    rank: int,
    cols: int,
    *,
    col0: int,
    is_b: bool,
) -> None:
    for row0 in range(0, rank, RANK_BLOCK):
        rows = min(RANK_BLOCK, rank - row0)
        group.blocks.append(Block(target, is_b, row0, rows, col0, cols, group.num_bytes))
        group.num_bytes += -(-rows * cols * layout.item_bytes // OFFSET_UNIT) * OFFSET_UNIT


def _moved(block: Block, by: int) -> Block:
    return Block(
        block.target, block.is_b, block.row0, block.rows, block.col0, block.cols, block.offset + by
    )


def _num_blocks(rank: int) -> int:
    return -(-rank // RANK_BLOCK)


def _matrix(data: npt.NDArray[np.uint8], tensor: TensorLocator, dtype: str) -> Bits:
    raw = data[tensor.offset : tensor.offset + tensor.num_bytes]
    if tensor.offset % 4:
        raw = raw.copy()
    bits = raw.view(_FILE_DTYPE[tensor.dtype]).reshape(tensor.shape)
    return as_layout_bits(bits, tensor.dtype, dtype, tensor.name)
