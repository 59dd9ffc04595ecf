"""Constants of the attention kernels by size of launch; measured ones carry GPU, shape, time."""

from __future__ import annotations

from dataclasses import dataclass

#: queries of a prefill tile: positions times the heads that share a KV head
TILE_QUERIES = 128
#: a decode launch of fewer programs does not fill a GPU, so contexts are split
PROGRAMS = 1024
MIN_SPLITS, MAX_SPLITS = 4, 64


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Args:
    block_n: positions an iteration.
    splits: parts of a context at most; part of the grid.
    min_chunk: positions below which a part is not split further.
    """

    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    min_chunk: int


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Args:
    queries: of a tile's TILE_QUERIES in one program.
    block_n: positions an iteration.
    """

    queries: int
    block_n: int
    num_warps: int
    num_stages: int


def max_splits(num_rows: int, num_kv_heads: int) -> int:
    """Parts of a context at most: a power of two that only the size of the batch decides."""
    splits = MIN_SPLITS
    while splits < MAX_SPLITS and splits * num_rows * num_kv_heads < PROGRAMS:
        splits *= 2
    return splits


def decode_tuning(num_rows: int, num_kv_heads: int, dim: int, item_bytes: int) -> DecodeTuning:
    """First values, not tuned."""
    splits = max_splits(num_rows, num_kv_heads)
    block_n = 64 if dim * item_bytes <= 256 else 32
    items = num_rows * num_kv_heads
    min_chunk = 1024 if items >= PROGRAMS else 128 if items > 128 else 64
    return DecodeTuning(block_n, 4, 3, splits, min_chunk)


def prefill_tuning(dim: int, item_bytes: int) -> PrefillTuning:
    """First values, not tuned."""
    if item_bytes == 4:
        return PrefillTuning(32, 32, 4, 2 if dim <= 128 else 1)
    return PrefillTuning(TILE_QUERIES, 64 if dim <= 128 else 32, 8, 3)
