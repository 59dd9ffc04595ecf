"""Tuned constants of the LoRA kernels, by the shape of a site. Nothing is tuned at run time.

Each choice depends on in_features or out_features only, never on ranks, adapters or tokens, so one
compiled launch serves every step. `make bench-ops ARGS=--sweep` measures the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.lora_tables import PREFILL_TILE_ROWS, TILE_ROWS

#: partial sums of a shrink that a consumer can be asked to add
MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class ShrinkTuning:
    """Args:
    split_k: inputs summed into one partial.
    block_k: inputs read at once; divides split_k.
    programs, lanes: grid; programs walk (tile, slice, split), lanes the rank blocks of one.
    registers: a thread, at most; 128 lets four programs of 128 threads share a multiprocessor.
    block_ranks: rows of A of one product; decode takes one rank block, prefill a few.
    """

    split_k: int
    block_k: int
    programs: int
    lanes: int
    num_warps: int
    num_stages: int = 1
    registers: int = 128
    block_ranks: int = 16


@dataclass(frozen=True, slots=True)
class DeltaTuning:
    """Args:
    block_columns: columns of one work item.
    dot_columns: columns of one product of several rows; divides block_columns.
    programs: grid.
    """

    block_columns: int
    dot_columns: int
    programs: int
    num_warps: int
    num_stages: int = 1
    registers: int = 128


# First values, from a prototype's measurements on an H200 (triton 3.6): a program reads 16 rows of
# 512 inputs, or 16 rows of 256 columns a warp.
_SHRINK = ShrinkTuning(512, 512, programs=528, lanes=2, num_warps=4)
_SHRINK_LONG_K = ShrinkTuning(1024, 1024, programs=528, lanes=2, num_warps=8)
_DELTA = DeltaTuning(1024, 256, programs=528, num_warps=4)
_PREFILL_SHRINK = ShrinkTuning(
    0, 64, programs=1056, lanes=1, num_warps=4, num_stages=5, registers=255, block_ranks=64
)
_PREFILL_DELTA = DeltaTuning(256, 256, programs=1056, num_warps=4)
_PREFILL_SPLITS = 2

#: `bench-ops --sweep` tries these
SHRINK_CANDIDATES = tuple(
    ShrinkTuning(split_k, block_k, programs, lanes, num_warps)
    for split_k, block_k, num_warps in ((512, 512, 4), (1024, 1024, 8), (1024, 256, 4))
    for programs in (264, 528, 1056)
    for lanes in (1, 2)
)
DELTA_CANDIDATES = tuple(
    DeltaTuning(256 * num_warps, dot_columns, programs, num_warps)
    for num_warps, dot_columns in ((2, 128), (4, 256), (8, 512))
    for programs in (264, 528, 1056)
)


def shrink_tuning(in_features: int, tile_rows: int) -> ShrinkTuning:
    """How lora_shrink cuts a product of `in_features` inputs."""
    if tile_rows == PREFILL_TILE_ROWS:
        base = _PREFILL_SHRINK
        half = -(-in_features // _PREFILL_SPLITS)
        split_k = -(-half // base.block_k) * base.block_k
    else:
        base = _SHRINK if in_features <= MAX_SPLITS * _SHRINK.split_k else _SHRINK_LONG_K
        # a very long sum has longer parts, not more of them
        parts = -(-in_features // (MAX_SPLITS * base.split_k))
        split_k = base.split_k * parts
    return replace(base, split_k=split_k)


def delta_tuning(out_features: int, tile_rows: int) -> DeltaTuning:
    """How lora_delta cuts a site of `out_features` columns."""
    del out_features  # one choice for all, so far
    return _PREFILL_DELTA if tile_rows == PREFILL_TILE_ROWS else _DELTA


def num_splits(in_features: int, tile_rows: int = TILE_ROWS) -> int:
    """Partial sums that lora_shrink writes for a site: the first size of `u`."""
    return -(-in_features // shrink_tuning(in_features, tile_rows).split_k)
