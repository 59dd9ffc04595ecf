"""Reads safetensors files without trusting them: header, offsets, and whether values are finite.

Memory is bounded by MAX_HEADER_BYTES and one chunk, time by the file's size. Nothing is mapped, so
a file that shrinks meanwhile is an error, not a crash.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from loraplex.adapter_format.jsontext import parse_object
from loraplex.adapter_format.spec import DTYPES, TensorLocator
from loraplex.status import AdapterRefused

MAX_HEADER_BYTES = 4 << 20
MAX_DIMENSIONS = 8
_CHUNK_BYTES = 1 << 20
_ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
#: bits that are all ones in infinities and NaNs, and only there
_EXPONENT = {"F32": 0x7F80_0000, "F16": 0x7C00, "BF16": 0x7F80}


def read_header(source: Path | memoryview, file: str) -> tuple[TensorLocator, ...]:
    """The tensors of one file, in the order of their bytes.

    Args: source, the file or all of its bytes; file, its name in messages.
    Raises: AdapterRefused WEIGHTS_INVALID when the file is no whole safetensors file.
    """
    if isinstance(source, memoryview):
        size = len(source)
        header_bytes = _header_length(bytes(source[:8]), size, file)
        header = bytes(source[8 : 8 + header_bytes])
    else:
        try:
            size = source.stat().st_size
            with source.open("rb") as stream:
                header_bytes = _header_length(stream.read(8), size, file)
                header = stream.read(header_bytes)
        except OSError as error:
            raise _invalid(file, f"cannot be read: {error.strerror}") from error
    if len(header) != header_bytes:
        raise _invalid(file, "ends inside its header")
    table = parse_object(header, file, "WEIGHTS_INVALID")
    data_start = 8 + header_bytes
    tensors = [
        _locator(file, name, entry, data_start)
        for name, entry in table.items()
        if name != "__metadata__"
    ]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    _check_gapless(file, tensors, data_start, size)
    return tuple(tensors)


def check_finite(path: Path, tensors: tuple[TensorLocator, ...]) -> None:
    """Read every value once.

    Raises: AdapterRefused WEIGHTS_NOT_FINITE with the name of the first tensor that holds a NaN or
    an infinity; WEIGHTS_INVALID when the file ends early.
    """
    buffer = bytearray(_CHUNK_BYTES)
    try:
        with path.open("rb", buffering=0) as stream:
            for tensor in tensors:
                _check_tensor(stream, tensor, buffer)
    except OSError as error:
        raise _invalid(path.name, f"cannot be read: {error.strerror}") from error


def _check_tensor(stream: BinaryIO, tensor: TensorLocator, buffer: bytearray) -> None:
    bits, _ = DTYPES[tensor.dtype]
    mask = np.array(_EXPONENT[tensor.dtype], bits)
    stream.seek(tensor.offset)
    left, view = tensor.num_bytes, memoryview(buffer)
    while left:
        wanted = min(left, _CHUNK_BYTES)
        filled = 0
        while filled < wanted:
            count = stream.readinto(view[filled:wanted])  # type: ignore[attr-defined]
            if not count:
                raise _invalid(tensor.file, f"ends inside tensor {tensor.name}")
            filled += count
        if (np.frombuffer(view[:wanted], bits) & mask).max() == mask:
            raise AdapterRefused(
                f"{tensor.file}: tensor {tensor.name} holds NaN or infinity; the training has "
                "diverged, publish an earlier checkpoint",
                reason="WEIGHTS_NOT_FINITE",
                metadata={"field": tensor.name, "value": "NaN or infinity", "limit": "finite"},
            )
        left -= wanted


def _header_length(prefix: bytes, size: int, file: str) -> int:
    if len(prefix) < 8:
        raise _invalid(file, f"has {size} bytes, too few for a safetensors file")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_HEADER_BYTES:
        raise _invalid(file, f"header is {length} bytes long; at most {MAX_HEADER_BYTES}")
    if 8 + length > size:
        raise _invalid(file, f"header is {length} bytes long, the file {size}: truncated")
    return length


def _locator(file: str, name: str, entry: Any, data_start: int) -> TensorLocator:
    if not isinstance(entry, dict):
        raise _invalid(file, f"tensor {name[:200]}: its header entry is no object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise _invalid(file, f"tensor {name[:200]}: dtype is {str(dtype)[:40]!r}")
    if not _is_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _invalid(file, f"tensor {name[:200]}: shape is {str(shape)[:100]}")
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _invalid(file, f"tensor {name[:200]}: data_offsets are {str(offsets)[:100]}")
    num_bytes = offsets[1] - offsets[0]
    if math.prod(shape) * _ITEM_BYTES[dtype] != num_bytes:
        raise _invalid(
            file, f"tensor {name[:200]}: {dtype} {shape} does not take {num_bytes} bytes"
        )
    return TensorLocator(file, name, dtype, tuple(shape), data_start + offsets[0], num_bytes)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 48
        for item in value
    )


def _check_gapless(file: str, tensors: list[TensorLocator], start: int, size: int) -> None:
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise _invalid(file, f"tensor {tensor.name[:200]} {what} the one before it")
        end += tensor.num_bytes
    if end != size:
        what = "truncated" if end > size else "has bytes that no tensor owns"
        raise _invalid(file, f"is {size} bytes long, its header describes {end}: {what}")


def _invalid(file: str, problem: str) -> AdapterRefused:
    return AdapterRefused(
        f"{file}: {problem}", reason="WEIGHTS_INVALID", metadata={"field": file, "value": problem}
    )
