"""Gains and constants of whole sites: vectors of fp32 numbers beside an adapter's matrices.

What needs the base's weights is left to the model, which has them: a gain is written as DoRA's
magnitude and a replaced bias as it is; `raw` says which slices (engine_svc/packed.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_svc.adapters.convert import as_layout_bits
from engine_svc.layout import OFFSET_UNIT, AdapterLayout
from engine_svc.packed import RAW_BIAS, RAW_MAGNITUDE
from loraplex.adapter_format import AdapterParts, TensorLocator
from loraplex.base_model import NO_LAYER

_FILE_DTYPE = {"F32": "<u4", "F16": "<u2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Addend:
    """factor · numbers row0 … of `values`, for columns col0 … of the site."""

    values: TensorLocator
    factor: float
    row0: int
    num_rows: int
    col0: int


@dataclass(frozen=True, slots=True)
class Vector:
    """The gain or the constant of one (layer, site), written at byte `offset` of the images."""

    cell: int
    is_gain: bool
    num_cols: int
    addends: tuple[Addend, ...]
    offset: int = -1

    @property
    def num_bytes(self) -> int:
        return -(-4 * self.num_cols // OFFSET_UNIT) * OFFSET_UNIT


def plan_vectors(
    parts: AdapterParts, layout: AdapterLayout
) -> tuple[list[Vector], npt.NDArray[np.int32]]:
    """The vectors that an adapter needs, without offsets, and the `raw` array."""
    raw = np.zeros(layout.num_entries, np.int32)
    drafts: dict[tuple[int, bool], list[Addend]] = {}

    def need(layer: int, module: str, *, is_gain: bool, flag: int = 0) -> tuple[list[Addend], int]:
        """The draft for a module's site, and the module's first column in it."""
        entries = layout.entries_of(layer, module)
        for entry, _ in entries:
            raw[entry] |= flag
        first = entries[0][1]
        cell = layout.site_cell(layer, first.site)
        return drafts.setdefault((cell, is_gain), []), first.col0

    for target in parts.targets:
        rows = (target.row0, target.num_rows)
        if target.magnitude is not None:
            gain, col0 = need(target.layer, target.module, is_gain=True, flag=RAW_MAGNITUDE)
            gain.append(Addend(target.magnitude, 1.0, *rows, col0))
            site = layout.entries_of(target.layer, target.module)[0][1].site
            if target.layer != NO_LAYER and layout.sites[site].has_bias:
                need(target.layer, target.module, is_gain=False)
        if target.b_bias is not None:
            constant, col0 = need(target.layer, target.module, is_gain=False)
            constant.append(Addend(target.b_bias, target.scaling, *rows, col0))
    for bias in parts.biases:
        constant, col0 = need(bias.layer, bias.module, is_gain=False, flag=RAW_BIAS)
        constant.append(Addend(bias.values, 1.0, bias.row0, bias.num_rows, col0))
    vectors = [
        Vector(cell, is_gain, layout.site_of_cell(cell)[1].out_features, tuple(addends))
        for (cell, is_gain), addends in drafts.items()
    ]
    return vectors, raw


def write_vector(vector: Vector, data: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Fill `out`; columns without an addend become 1 in a gain and 0 in a constant."""
    out[:] = 0.0
    if vector.is_gain:
        out[: vector.num_cols] = 1.0
        for part in vector.addends:
            out[part.col0 : part.col0 + part.num_rows] = 0.0
    for part in vector.addends:
        columns = slice(part.col0, part.col0 + part.num_rows)
        out[columns] += np.float32(part.factor) * _numbers(data, part)


def _numbers(data: npt.NDArray[np.uint8], part: Addend) -> npt.NDArray[np.float32]:
    tensor = part.values
    item_bytes = tensor.num_bytes // tensor.shape[0]
    start = tensor.offset + part.row0 * item_bytes
    raw = data[start : start + part.num_rows * item_bytes].copy()
    bits = raw.view(_FILE_DTYPE[tensor.dtype])
    return as_layout_bits(bits, tensor.dtype, "float32", tensor.name).view(np.float32)
