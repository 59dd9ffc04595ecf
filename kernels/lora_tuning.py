"""Tuned constants of the LoRA kernels, by the shape of a site. Nothing is tuned at run time.

Each choice depends on in_features or out_features only, never on ranks, adapters or tokens, so one
compiled launch serves every step. `make bench-ops ARGS=--sweep` measures the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from kernels.lora_tables import PREFILL_TILE_ROWS, TILE_ROWS

#: partial sums that a delta is asked to add. With 14 instead of 7 at down (8B shape) the delta took
#: 16.5 instead of 9.2 µs, 64 rows of eight adapters of mixed ranks; the shrink gained 0 to 2
MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class ShrinkTuning:
    """Args:
    split_k: inputs summed into one partial.
    block_k: inputs of one row read by one instruction; divides split_k.
    programs: grid; programs walk (tile, rank block, slice, split).
    dot_k: inputs of one product of several rows, `num_stages` of them on their way; divides
        split_k. Decode only.
    registers: a thread, at most; 128 lets four programs of 128 threads share a multiprocessor.
    block_ranks: rows of A of one product; decode takes one rank block, prefill a few.
    early: begin before the kernel before has ended (programmatic dependent launch).
    leads: let an early delta begin as soon as all programs have begun; else when they end.
    few_rows: tiles of up to so many rows are multiplied and summed, without tensor cores.
    """

    split_k: int
    block_k: int
    programs: int
    num_warps: int
    dot_k: int = 0
    num_stages: int = 1
    registers: int = 128
    block_ranks: int = 16
    early: bool = False
    leads: bool = True
    few_rows: int = 1


@dataclass(frozen=True, slots=True)
class DeltaTuning:
    """Args:
    block_columns: columns of one work item.
    dot_columns: columns of one product of several rows; divides block_columns.
    programs: grid.
    early: begin before the shrink has ended (programmatic dependent launch).
    dot_rows: rows of one product in a prefill.
    few_rows: as in ShrinkTuning.
    """

    block_columns: int
    dot_columns: int
    programs: int
    num_warps: int
    num_stages: int = 1
    registers: int = 128
    early: bool = True
    dot_rows: int = 16
    few_rows: int = 1


# From sweeps on an H200 (triton 3.6, 8B shape, commit 13c3b2b): a warp reads 16 rows of 256 inputs
# in products of 128, or 16 rows of 256 columns. 1024 inputs at once cost 2 to 4 µs more at down, in
# a batch of 64: 13.7 → 11.1 with 8 adapters, 24.1 → 21.5 with 64.
# Tensor cores from two rows on in the shrink, from three on in the delta (after commit 880f64d, a
# layer's four, alone): 32 adapters of four rows each, shrink 59.6 → 33.4 µs against up to four rows
# without; 64 adapters of two rows each, delta 63.6 → 52.4 against two rows with them.
_SHRINK = ShrinkTuning(1024, 256, programs=528, num_warps=4, dot_k=128, num_stages=4)
_DELTA = DeltaTuning(1024, 256, programs=528, num_warps=4, few_rows=2)
#: of more than so many partials, which each program sums for itself: fewer programs, more columns.
#: 64 rows of 64 adapters, down, in-layer: 8.6 → 5.6 µs; 128 of 32 8.3 → 5.1 (commit b9a1d40)
_FEW_PARTIALS = 4
_MANY_PARTIALS_DELTA = DeltaTuning(2048, 256, programs=264, num_warps=8, few_rows=2)
_PREFILL_SHRINK = ShrinkTuning(
    0, 64, programs=1056, num_warps=4, num_stages=5, registers=255, block_ranks=64
)
_PREFILL_DELTA = DeltaTuning(256, 256, programs=2112, num_warps=4, dot_rows=32)
#: of more than so many columns
_WIDE_COLUMNS = 16384
_WIDE_PREFILL_DELTA = DeltaTuning(512, 512, programs=2112, num_warps=4, registers=168)
_PREFILL_SPLITS = 2

#: `bench-ops --sweep` tries these
SHRINK_CANDIDATES = tuple(
    ShrinkTuning(split_k, 256, programs, 4, dot_k, 4, registers)
    for split_k, dot_k, registers in ((1024, 256, 168), (1024, 128, 128), (512, 128, 128))
    for programs in (264, 528)
)
DELTA_CANDIDATES = tuple(
    DeltaTuning(columns, dot_columns, programs, warps)
    for columns, dot_columns, warps in (
        (1024, 256, 4),
        (1024, 512, 4),
        (2048, 256, 8),
        (2048, 512, 8),
    )
    for programs in (264, 528, 1056)
)
#: the same for steps with long segments
PREFILL_SHRINK_CANDIDATES = tuple(
    replace(_PREFILL_SHRINK, block_k=block_k, num_warps=warps, num_stages=stages, block_ranks=ranks)
    for block_k, warps, stages, ranks in (
        (64, 4, 3, 64),
        (128, 8, 3, 64),
        (64, 8, 4, 64),
        (128, 4, 3, 16),
    )
)
PREFILL_DELTA_CANDIDATES = tuple(
    DeltaTuning(columns, columns, programs, warps, num_stages=stages, dot_rows=rows)
    for columns, rows, warps, stages in (
        (256, 16, 4, 1),
        (256, 32, 4, 1),
        (256, 32, 4, 2),
        (256, 64, 8, 1),
        (512, 16, 4, 1),
        (128, 64, 4, 1),
    )
    for programs in (528, 2112)
)


@cache
def shrink_tuning(in_features: int, tile_rows: int) -> ShrinkTuning:
    """How lora_shrink cuts a product of `in_features` inputs."""
    if tile_rows == PREFILL_TILE_ROWS:
        base = _PREFILL_SHRINK
        half = -(-in_features // _PREFILL_SPLITS)
        split_k = -(-half // base.block_k) * base.block_k
    else:
        base = _SHRINK
        # a very long sum has longer parts, not more of them
        parts = -(-in_features // (MAX_SPLITS * base.split_k))
        split_k = base.split_k * parts
    return replace(base, split_k=split_k)


def delta_tuning(out_features: int, tile_rows: int, partials: int) -> DeltaTuning:
    """How lora_delta cuts a site of `out_features` columns, whose u has so many partials."""
    if tile_rows == PREFILL_TILE_ROWS:
        return _WIDE_PREFILL_DELTA if out_features > _WIDE_COLUMNS else _PREFILL_DELTA
    return _DELTA if partials <= _FEW_PARTIALS else _MANY_PARTIALS_DELTA


def num_splits(in_features: int, tile_rows: int = TILE_ROWS) -> int:
    """Partial sums that lora_shrink writes for a site: the first size of `u`."""
    return -(-in_features // shrink_tuning(in_features, tile_rows).split_k)
