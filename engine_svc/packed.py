"""The packed file: one adapter, cut into page images, ready to be copied into arena pages without
a change.

    offset 0     magic b"LPXPACK1", uint32 header length, then that many bytes of UTF-8 JSON
                 {"digest", "layout", "num_pages", "rank_blocks", "used_bytes", "arrays": {name:
                 [dtype, shape, offset]}}
    then         the arrays, each 64-byte aligned, offsets from the file's start
    images       at the next multiple of 4096: num_pages · page_bytes bytes

Arrays, little-endian, E = layout.num_entries, F = layout.num_site_cells, RB = rank blocks of this
adapter:

    rank   int32[E]      true rank, 0 = this entry has no LoRA
    scale  float32[E]    scaling; multiplies the fp32 shrink output
    a_off  int64[E, RB]  block of A: [rows, in_features], row-major, rows = min(16, rank − 16·block)
    b_off  int64[E, RB]  block of B, rank-major: [rows, num_cols]
    g_off  int64[F]      per-row gain g of a site, [out_features] fp32; −1 = none (all ones)
    c_off  int64[F]      per-row constant c, [out_features] fp32; −1 = none (all zeros)
    <table>_off  int64[run]  runs of rows of layout.TABLES, row-major; no runs = no such table
    raw    int32[E]      what the base's weights must complete once the images lie in the arena:
                         RAW_MAGNITUDE: g holds DoRA's magnitude here, and B is not yet g ⊙ B;
                         RAW_BIAS: c holds a bias here that takes the place of the base's

Offsets count OFFSET_UNIT bytes from the first page image. The epilogue is y ← g ⊙ y + c + Σ_block
scale · (x·Aᵀ)·B. Where a slice has RAW_MAGNITUDE and the base's site has a bias, c is there too.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_svc.layout import OFFSET_UNIT, RANK_BLOCK, TABLES, AdapterLayout

MAGIC = b"LPXPACK1"
IMAGE_ALIGN = 4096
ARRAY_ALIGN = 64
RAW_MAGNITUDE, RAW_BIAS = 1, 2
_PREFIX = struct.Struct("<8sI")
_ARRAY_DTYPES = frozenset({"<i4", "<f4", "<i8"})

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class PackedHeader:
    """`arrays` are views of the buffer they were read from."""

    digest: str
    layout: str
    num_pages: int
    rank_blocks: int
    used_bytes: int
    arrays: Mapping[str, Array]
    image_offset: int


class PackedFileInvalid(ValueError):
    """The bytes are not a packed file of this layout; the message says what differs."""


def encode_header(
    digest: str, layout: str, num_pages: int, used_bytes: int, arrays: Mapping[str, Array]
) -> bytes:
    """Everything before the page images, padded to IMAGE_ALIGN."""
    rank_blocks = int(arrays["a_off"].shape[1])
    length = 4096
    while True:
        table, end = _place(arrays, length)
        fields = {
            "digest": digest, "layout": layout, "num_pages": num_pages,
            "rank_blocks": rank_blocks, "used_bytes": used_bytes, "arrays": table,
        }  # fmt: skip
        text = json.dumps(fields).encode()
        if _PREFIX.size + len(text) <= length:
            break
        length *= 2
    out = bytearray(_aligned(end, IMAGE_ALIGN))
    _PREFIX.pack_into(out, 0, MAGIC, len(text))
    out[_PREFIX.size : _PREFIX.size + len(text)] = text
    for name, array in arrays.items():
        offset = table[name][2]
        payload = np.ascontiguousarray(array).tobytes()
        out[offset : offset + len(payload)] = payload
    return bytes(out)


def decode_header(buffer: memoryview, layout: str) -> PackedHeader:
    """Read the header of a packed file that begins at buffer[0].

    Raises: PackedFileInvalid when magic, lengths or `layout` are not as expected.
    """
    try:
        magic, length = _PREFIX.unpack_from(buffer, 0)
        if magic != MAGIC:
            raise PackedFileInvalid(f"magic is {magic!r}, expected {MAGIC!r}")
        fields = json.loads(bytes(buffer[_PREFIX.size : _PREFIX.size + length]))
        if fields["layout"] != layout:
            raise PackedFileInvalid(f"layout is {fields['layout']}, this engine's is {layout}")
        arrays, end = {}, _PREFIX.size + length
        for name, (dtype, shape, offset) in fields["arrays"].items():
            array = _array(buffer, name, dtype, shape, offset)
            arrays[name] = array
            end = max(end, offset + array.nbytes)
        return PackedHeader(
            str(fields["digest"]), layout, _count(fields, "num_pages"),
            _count(fields, "rank_blocks"), _count(fields, "used_bytes"),
            arrays, _aligned(end, IMAGE_ALIGN),
        )  # fmt: skip
    except PackedFileInvalid:
        raise
    except (struct.error, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise PackedFileInvalid(f"header cannot be read: {error}") from error


def check_packed(buffer: memoryview, header: PackedHeader, layout: AdapterLayout) -> None:
    """Hold a decoded header against its layout, so that every offset lies inside the images.

    Raises: PackedFileInvalid with the first array or number that does not fit.
    """
    if header.image_offset + header.num_pages * layout.page_bytes != len(buffer):
        raise PackedFileInvalid(f"{len(buffer)} bytes do not hold {header.num_pages} pages")
    entries, cells, blocks = layout.num_entries, layout.num_site_cells, header.rank_blocks
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "rank": ("<i4", (entries,)), "scale": ("<f4", (entries,)),
        "a_off": ("<i8", (entries, blocks)), "b_off": ("<i8", (entries, blocks)),
        "g_off": ("<i8", (cells,)), "c_off": ("<i8", (cells,)), "raw": ("<i4", (entries,)),
    }  # fmt: skip
    for name in TABLES:
        table = header.arrays.get(f"{name}_off")
        runs = 0 if table is None or table.ndim != 1 else table.shape[0]
        shapes[f"{name}_off"] = ("<i8", (runs,))
    units = header.num_pages * layout.page_bytes // OFFSET_UNIT
    for name, (dtype, shape) in shapes.items():
        array = header.arrays.get(name)
        if array is None or array.dtype.str != dtype or array.shape != shape:
            raise PackedFileInvalid(f"array {name} is not {dtype} {shape}")
        if name.endswith("_off") and array.size and not (-1 <= array.min() <= array.max() < units):
            raise PackedFileInvalid(f"array {name} points outside the page images")
    rank = header.arrays["rank"]
    if rank.size and not (0 <= rank.min() <= rank.max() <= blocks * RANK_BLOCK):
        raise PackedFileInvalid(f"a rank is outside 0 … {blocks * RANK_BLOCK}")


def _array(buffer: memoryview, name: str, dtype: str, shape: list[int], offset: int) -> Array:
    if np.dtype(dtype).str not in _ARRAY_DTYPES or len(shape) > 2 or offset < 0:
        raise PackedFileInvalid(f"array {name} is {dtype} {shape} at {offset}")
    if any(not isinstance(size, int) or not 0 <= size < 1 << 32 for size in shape):
        raise PackedFileInvalid(f"array {name} has shape {shape}")
    return np.frombuffer(buffer, np.dtype(dtype), math.prod(shape), offset).reshape(shape)


def _count(fields: Mapping[str, object], name: str) -> int:
    value = fields[name]
    if not isinstance(value, int) or not 0 <= value < 1 << 48:
        raise PackedFileInvalid(f"{name} is {value!r}")
    return value


def _place(
    arrays: Mapping[str, Array], start: int
) -> tuple[dict[str, tuple[str, list[int], int]], int]:
    table, offset = {}, start
    for name, array in arrays.items():
        offset = _aligned(offset, ARRAY_ALIGN)
        table[name] = (array.dtype.str, list(array.shape), offset)
        offset += array.nbytes
    return table, offset


def _aligned(value: int, unit: int) -> int:
    return (value + unit - 1) // unit * unit
