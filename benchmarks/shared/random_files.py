"""Large files of random numbers at the speed of the page cache: one block of numbers, repeated from
another place for each span, written by several threads."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_BLOCK_NUMBERS = (1 << 21) + 24
_THREADS = 8
#: by numpy's and torch's name: bytes of a number, and its name in safetensors
_DTYPES = {"float32": (4, "F32"), "float16": (2, "F16"), "bfloat16": (2, "BF16")}


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file, filled with the block from its number `first` on."""

    offset: int
    num_bytes: int
    first: int = 0


class RandomNumbers:
    """One block of numbers, and how safetensors calls their type."""

    def __init__(self, item_bytes: int, safetensors_dtype: str, block: bytes) -> None:
        self.item_bytes, self.safetensors_dtype, self._block = item_bytes, safetensors_dtype, block

    @classmethod
    def normal(cls, dtype: str, deviation: float) -> RandomNumbers:
        """Normal numbers of one deviation; bf16 is cut off instead of rounded."""
        wide = np.random.default_rng(0).standard_normal(_BLOCK_NUMBERS, np.float32)
        wide *= np.float32(deviation)
        if dtype == "bfloat16":
            block = (wide.view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            block = wide.astype(dtype).tobytes()
        return cls(*_DTYPES[dtype], block)

    @classmethod
    def reproducible(cls, seed: int) -> RandomNumbers:
        """bf16 numbers of ± 1/128 … 1/64, the same bits on every machine for ever."""
        bits = hashlib.shake_128(str(seed).encode()).digest(2 * _BLOCK_NUMBERS)
        drawn = np.frombuffer(bits, "<u2")
        return cls(*_DTYPES["bfloat16"], ((drawn & 0x807F) | 0x3C00).astype("<u2").tobytes())

    def write(self, path: Path, spans: Iterable[Span]) -> None:
        """Fill spans of an existing file."""
        descriptor = os.open(path, os.O_WRONLY)
        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(lambda span: self._fill(descriptor, span), spans))
        finally:
            os.close(descriptor)

    def _fill(self, descriptor: int, span: Span) -> None:
        block = memoryview(self._block)
        start, done = span.first * self.item_bytes % len(block), 0
        while done < span.num_bytes:
            piece = block[start : start + span.num_bytes - done]
            done += os.pwrite(descriptor, piece, span.offset + done)
            start = (start + len(piece)) % len(block)


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], numbers: RandomNumbers
) -> None:
    """A safetensors file of these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, spans = 0, []
    for index, (name, shape) in enumerate(shapes.items()):
        start, end = end, end + int(np.prod(shape)) * numbers.item_bytes
        header[name] = {
            "dtype": numbers.safetensors_dtype, "shape": list(shape), "data_offsets": [start, end],
        }  # fmt: skip
        spans.append((start, end - start, 4099 * index))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    first = 8 + len(text)
    os.truncate(path, first + end)
    numbers.write(path, [Span(first + start, size, shift) for start, size, shift in spans])
