"""Converts matrices between the dtypes of files and of the arena, as bits, without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loraplex.status import AdapterRefused

Bits = npt.NDArray[np.unsignedinteger]

_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def as_layout_bits(bits: Bits, file_dtype: str, layout_dtype: str, name: str) -> Bits:
    """The same values in `layout_dtype`, rounded to nearest even where it is narrower.

    Args:
        bits: the file's values as unsigned integers of their width.

    Raises: AdapterRefused WEIGHTS_NOT_FINITE when a finite value becomes an infinity.
    """
    source = _NAMES[file_dtype]
    if source == layout_dtype:
        return bits
    wide = _to_float32(bits, source)
    if layout_dtype == "float32":
        return wide.view(np.uint32)
    narrow = _to_bfloat16(wide) if layout_dtype == "bfloat16" else _to_float16(wide)
    exponent = np.uint16(0x7F80 if layout_dtype == "bfloat16" else 0x7C00)
    if ((narrow & exponent) == exponent).any():
        raise AdapterRefused(
            f"tensor {name} holds values that {layout_dtype} cannot hold; use another --dtype",
            reason="WEIGHTS_NOT_FINITE",
            metadata={"field": name, "limit": f"finite in {layout_dtype}"},
        )
    return narrow


def _to_float32(bits: Bits, source: str) -> npt.NDArray[np.float32]:
    if source == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if source == "float16":
        return bits.view(np.float16).astype(np.float32)
    return bits.view(np.float32)


def _to_bfloat16(wide: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = wide.view(np.uint32)
    rounding = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)


def _to_float16(wide: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    with np.errstate(over="ignore"):
        return wide.astype(np.float16).view(np.uint16)
