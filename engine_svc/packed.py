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

Offsets count OFFSET_UNIT bytes from the first page image. The epilogue is y ← g ⊙ y + c + Σ_block
scale · (x·Aᵀ)·B.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAGIC = b"LPXPACK1"
IMAGE_ALIGN = 4096
ARRAY_ALIGN = 64
_PREFIX = struct.Struct("<8sI")

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
        arrays, end = {}, 0
        for name, (dtype, shape, offset) in fields["arrays"].items():
            count = int(np.prod(shape))
            array = np.frombuffer(buffer, np.dtype(dtype), count, offset).reshape(shape)
            arrays[name] = array
            end = max(end, offset + array.nbytes)
        return PackedHeader(
            fields["digest"], layout, fields["num_pages"], fields["rank_blocks"],
            fields["used_bytes"], arrays, _aligned(end, IMAGE_ALIGN),
        )  # fmt: skip
    except (struct.error, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PackedFileInvalid(f"header cannot be read: {error}") from error


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
