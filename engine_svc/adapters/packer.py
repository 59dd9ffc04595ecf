"""Turns checked LoRA tensors into the packed file of engine_svc/packed.py.

    plan_packing(parts, layout, …)     where everything goes: sizes only, no weights are read
    write_packed(plan, weights, out)   header and page images into `out`

Blocks go first-fit, largest first, so that pages fill up. The A blocks of one site and layer (q, k
and v) stay adjacent where a page holds them, so that they can be read as one matrix; an A that
several modules share lies there once. Vectors of gains and constants: vectors.py; tables of one row
a token: row_tables.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine_svc.adapters.convert import as_layout_bits
from engine_svc.adapters.row_tables import TableRun, plan_tables, write_run
from engine_svc.adapters.vectors import Vector, plan_vectors, write_vector
from engine_svc.layout import OFFSET_UNIT, RANK_BLOCK, AdapterLayout
from engine_svc.packed import Array, encode_header
from loraplex.adapter_format import AdapterParts, TargetSpec, TensorLocator
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
    parts: AdapterParts
    layout: AdapterLayout
    header: bytes
    blocks: tuple[Block, ...]
    vectors: tuple[Vector, ...]
    runs: tuple[TableRun, ...]
    num_pages: int
    used_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the whole packed file."""
        return len(self.header) + self.num_pages * self.layout.page_bytes


def plan_packing(parts: AdapterParts, layout: AdapterLayout, digest: str) -> PackPlan:
    """Place every block, vector and table: tables first, so that their full pages follow each
    other.

    Raises: AdapterRefused ADAPTER_TOO_LARGE when one block is larger than a page.
    """
    chosen = parts.targets
    num_blocks = max((_num_blocks(target.rank) for target in chosen), default=1)
    rank = np.zeros(layout.num_entries, np.int32)
    scale = np.zeros(layout.num_entries, np.float32)
    offsets = {
        False: np.full((layout.num_entries, num_blocks), -1, np.int64),
        True: np.full((layout.num_entries, num_blocks), -1, np.int64),
    }
    owners = _owners(chosen)
    vectors, raw = plan_vectors(parts, layout)
    groups: list[_Group | Vector] = [*_groups(chosen, owners, layout), *vectors]
    pages = _Pages(layout.page_bytes)
    runs, tables = plan_tables(parts, layout, pages.take)
    blocks: list[Block] = []
    placed: list[Vector] = []
    for group in sorted(groups, key=lambda group: -group.num_bytes):
        if isinstance(group, Vector):
            placed.append(replace(group, offset=pages.take(group.num_bytes)))
            continue
        for block in pages.place(group):
            blocks.append(block)
            for index in [block.target] if block.is_b else owners[block.target]:
                target = chosen[index]
                for entry in _entries(layout, target, block):
                    rank[entry], scale[entry] = target.rank, target.scaling
                    table = offsets[block.is_b]
                    table[entry, block.row0 // RANK_BLOCK] = block.offset // OFFSET_UNIT
    used = sum(block.rows * block.cols for block in blocks) * layout.item_bytes
    used += sum(vector.num_bytes for vector in placed)
    used += sum(run.rows * run.row_items for run in runs) * layout.item_bytes
    arrays: dict[str, Array] = {
        "rank": rank,
        "scale": scale,
        "a_off": offsets[False],
        "b_off": offsets[True],
        "g_off": _vector_offsets(placed, layout, is_gain=True),
        "c_off": _vector_offsets(placed, layout, is_gain=False),
        "raw": raw,
        **tables,
    }
    header = encode_header(digest, layout.digest, pages.count, used, arrays)
    return PackPlan(parts, layout, header, tuple(blocks), tuple(placed), runs, pages.count, used)


def write_packed(plan: PackPlan, weights: Path | memoryview, out: memoryview) -> None:
    """Fill `out`, plan.num_bytes long; bytes between blocks become zero.

    Args: weights, the safetensors file that was planned, or all of its bytes.
    Raises: AdapterRefused WEIGHTS_NOT_FINITE when a value does not fit the layout's dtype.
    """
    assert len(out) == plan.num_bytes, (len(out), plan.num_bytes)
    data = _bytes_of(weights)
    out[: len(plan.header)] = plan.header
    images = np.frombuffer(out, np.uint8)[len(plan.header) :]
    item_bytes = plan.layout.item_bytes
    bits = np.dtype(f"<u{item_bytes}")
    matrix: Bits | None = None
    current = (-1, False)
    end = 0
    taken = [(block.offset, block.rows * block.cols * item_bytes) for block in plan.blocks]
    taken += [(vector.offset, vector.num_bytes) for vector in plan.vectors]
    taken += [(run.offset, run.rows * run.row_items * item_bytes) for run in plan.runs]
    for offset, num_bytes in sorted(taken):
        images[end:offset] = 0
        end = offset + num_bytes
    images[end:] = 0
    for vector in plan.vectors:
        place = images[vector.offset : vector.offset + vector.num_bytes]
        write_vector(vector, data, place.view(np.float32))
    for tensor in {run.tensor: None for run in plan.runs}:
        matrix = _matrix(data, tensor, (0, tensor.shape[0]), plan.layout.dtype)
        for run in (run for run in plan.runs if run.tensor == tensor):
            num_bytes = run.rows * run.row_items * item_bytes
            write_run(run, matrix, images[run.offset : run.offset + num_bytes].view(bits))
    for block in sorted(plan.blocks, key=lambda block: (block.target, block.is_b)):
        target = plan.parts.targets[block.target]
        if matrix is None or current != (block.target, block.is_b):
            current = (block.target, block.is_b)
            rows = (target.row0, target.num_rows) if block.is_b else (0, target.rank)
            matrix = _matrix(data, target.b if block.is_b else target.a, rows, plan.layout.dtype)
        num_bytes = block.rows * block.cols * item_bytes
        place = images[block.offset : block.offset + num_bytes].view(bits)
        place = place.reshape(block.rows, block.cols)
        ranks = slice(block.row0, block.row0 + block.rows)
        if block.is_b:
            place[...] = matrix[block.col0 : block.col0 + block.cols, ranks].T
        else:
            place[...] = matrix[ranks]


def _bytes_of(weights: Path | memoryview) -> npt.NDArray[np.uint8]:
    if isinstance(weights, memoryview):
        return np.frombuffer(weights, np.uint8)
    # a plain array: slices of a memmap are slow to make
    return np.memmap(weights, np.uint8, "r").view(np.ndarray)


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
        if group.num_bytes > self._page_bytes and len(group.blocks) > 1:
            for part in group.halves():
                yield from self.place(part)
            return
        start = self.take(group.num_bytes)
        for block in group.blocks:
            yield _moved(block, start)

    def take(self, num_bytes: int) -> int:
        """The offset of so many bytes in one page.

        Raises: AdapterRefused ADAPTER_TOO_LARGE when no page can hold them.
        """
        if num_bytes > self._page_bytes:
            raise AdapterRefused(
                f"a block of {num_bytes} bytes does not fit a page of {self._page_bytes}; raise "
                "--page-size",
                reason="ADAPTER_TOO_LARGE",
            )
        num_bytes = -(-num_bytes // OFFSET_UNIT) * OFFSET_UNIT
        free = (i for i, used in enumerate(self._used) if used + num_bytes <= self._page_bytes)
        page = next(free, len(self._used))
        if page == len(self._used):
            self._used.append(0)
        start = page * self._page_bytes + self._used[page]
        self._used[page] += num_bytes
        return start


def _owners(targets: tuple[TargetSpec, ...]) -> dict[int, list[int]]:
    """First target that has an A → all that share it."""
    first: dict[str, int] = {}
    owners: dict[int, list[int]] = {}
    for index, target in enumerate(targets):
        owners.setdefault(first.setdefault(target.a.name, index), []).append(index)
    return owners


def _entries(layout: AdapterLayout, target: TargetSpec, block: Block) -> list[int]:
    """Table entries of the target that a block belongs to: all of A, for B those of its columns."""
    return [
        entry
        for entry, part in layout.entries_of(target.layer, target.module)
        if not block.is_b or part.module_col0 == block.col0
    ]


def _vector_offsets(vectors: list[Vector], layout: AdapterLayout, *, is_gain: bool) -> Array:
    table = np.full(layout.num_site_cells, -1, np.int64)
    for vector in vectors:
        if vector.is_gain == is_gain:
            table[vector.cell] = vector.offset // OFFSET_UNIT
    return table


def _groups(
    targets: tuple[TargetSpec, ...], owners: dict[int, list[int]], layout: AdapterLayout
) -> list[_Group]:
    """The A blocks of each (layer, site) together, every slice's B blocks by themselves."""
    groups: list[_Group] = []
    sites: dict[tuple[int, int], _Group] = {}
    for index, target in enumerate(targets):
        parts = [part for _, part in layout.entries_of(target.layer, target.module)]
        # an embedding's A is a table
        if index in owners and target.module != EMBEDDING:
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


def _matrix(
    data: npt.NDArray[np.uint8], tensor: TensorLocator, rows: tuple[int, int], dtype: str
) -> Bits:
    """Rows (first, count) of a matrix in the layout's dtype."""
    first, count = rows
    row_bytes = tensor.num_bytes // tensor.shape[0]
    start = tensor.offset + first * row_bytes
    raw = data[start : start + count * row_bytes]
    if start % 4:
        raw = raw.copy()
    bits = raw.view(_FILE_DTYPE[tensor.dtype]).reshape(count, tensor.shape[1])
    return as_layout_bits(bits, tensor.dtype, dtype, tensor.name)
