"""Tables of one row a token, cut into runs of one page each: where they go, and their bytes.

An embedding's A is stored transposed, so that the row of one token lies in one place; whole weights
of embeddings and head are stored as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_svc.layout import OFFSET_UNIT, TABLES, AdapterLayout
from engine_svc.packed import Array
from loraplex.adapter_format import AdapterParts, TensorLocator
from loraplex.base_model import EMBEDDING
from loraplex.status import AdapterRefused

Bits = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, slots=True)
class TableRun:
    """Rows row0 … row0 + rows − 1 of a table, at byte `offset` of the images."""

    tensor: TensorLocator
    is_transposed: bool
    row0: int
    rows: int
    row_items: int
    offset: int


def plan_tables(
    parts: AdapterParts,
    layout: AdapterLayout,
    place: Callable[[int], int],
) -> tuple[tuple[TableRun, ...], dict[str, Array]]:
    """Runs, and the offset arrays of all TABLES. Two tables of one tensor share its runs.

    Args: place, bytes of a run → its byte offset in the images.

    Raises: AdapterRefused ADAPTER_TOO_LARGE when one row is larger than a page.
    """
    wanted: dict[str, tuple[TensorLocator, bool]] = {}
    for target in parts.targets:
        if target.module == EMBEDDING:
            wanted["embedding_a"] = (target.a, True)
    for one in parts.saved:
        name = "embedding_weight" if one.module == EMBEDDING else "head_weight"
        wanted[name] = (one.weight, False)
    runs: dict[TensorLocator, list[TableRun]] = {}
    for tensor, is_transposed in wanted.values():
        if tensor not in runs:
            runs[tensor] = list(_runs(tensor, is_transposed, layout, place))
    arrays: dict[str, Array] = {}
    for name in TABLES:
        own = runs[wanted[name][0]] if name in wanted else []
        arrays[f"{name}_off"] = np.array([run.offset // OFFSET_UNIT for run in own], np.int64)
    return tuple(run for group in runs.values() for run in group), arrays


def write_run(run: TableRun, matrix: Bits, place: Bits) -> None:
    """Args: matrix, the whole tensor in the layout's dtype; place, the run's numbers, flat."""
    rows = slice(run.row0, run.row0 + run.rows)
    source = matrix[:, rows].T if run.is_transposed else matrix[rows]
    place.reshape(run.rows, run.row_items)[...] = source


def _runs(
    tensor: TensorLocator,
    is_transposed: bool,
    layout: AdapterLayout,
    place: Callable[[int], int],
) -> Iterable[TableRun]:
    num_rows, row_items = tensor.shape[::-1] if is_transposed else tensor.shape
    step = layout.table_rows_a_page(row_items)
    if not step:
        raise AdapterRefused(
            f"a row of {tensor.name} has {row_items * layout.item_bytes} bytes, more than a page "
            f"of {layout.page_bytes}; raise --page-size",
            reason="ADAPTER_TOO_LARGE",
        )
    for row0 in range(0, num_rows, step):
        rows = min(step, num_rows - row0)
        offset = place(rows * row_items * layout.item_bytes)
        yield TableRun(tensor, is_transposed, row0, rows, row_items, offset)
