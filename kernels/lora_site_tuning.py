"""How a site's launches stand beside its base GEMM, by the site's shape and a step's padded rows.

Both are fixed in a captured graph: which adapters the rows have, and how many, decides nothing.
`make bench-ops ARGS=--choose` measures the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.lora_tables import PREFILL_TILE_ROWS
from kernels.lora_tuning import DeltaTuning, ShrinkTuning, delta_tuning, shrink_tuning

#: of a site's branch beside its GEMM: which goes first where both could start
SOONER, SAME, LATER = -1, 0, 1
#: launches of a site: the pair on a branch, then the GEMM; the GEMM, then the pair on a branch;
#: the shrink, then the delta on a branch, then the GEMM; the GEMM, then the pair behind it
ORDERS = ("branch", "GEMM", "shrink", "after")


@dataclass(frozen=True, slots=True)
class SiteTuning:
    """Args:
    order: one of ORDERS.
    priority: of the branch against the main stream.
    processors: multiprocessors that the GEMM is chosen for (kernels.gemm_processors); 0: all.
    """

    shrink: ShrinkTuning
    delta: DeltaTuning
    order: str = "branch"
    priority: int = SOONER
    processors: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Args: programs, of both kernels; others as in SiteTuning and ShrinkTuning."""

    order: str
    priority: int
    programs: int = 528
    processors: int = 0
    packed: bool = False


_PACKED = _Place("branch", SAME, packed=True)
# From 40 candidates at each site and cell, in-layer (H200, torch 2.11, triton 3.6, 8B shape, rank
# 16, commit 13c3b2b). For each number of rows the least sum of time / goal over its cells is in
# force. Whole layers in µs, before → these: 1 row 13.2 → 8.5; 8 rows of 8 adapters 30.7 → 15.9; 64
# rows of 1, 8, 32, 64 adapters 37.9 → 15.9, 45.7 → 22.7, 70.6 → 55.3, 84.1 → 77.7; 256 rows, Zipf,
# 101.8 → 75.4, of 256 adapters 245 → 256: these lose less of their goal than the others gain.
# One exception, o with 64 rows: `_PACKED` costs 5.2, 5.9, 7.4, 9.5 with 1, 8, 32, 64 adapters, and
# 132 programs beside a GEMM for 112 processors 3.8, 4.6, 10.9, 15.1. The sums are within 2 % of one
# another; a step of few adapters loses 0.6 % of its goal by the first, one of 64 gains 2 %. The
# layers above were measured with the second.
# Each: most padded rows, then qkv, o, gate_up, down. Measured at 1, 8, 64 and 256 rows.
_PLACES: tuple[tuple[int, tuple[_Place, _Place, _Place, _Place]], ...] = (
    (
        2,
        (
            _Place("GEMM", LATER),
            _Place("GEMM", LATER, 66),
            _Place("GEMM", SAME, 33, processors=124),
            _Place("GEMM", SAME, 33),
        ),
    ),
    (
        16,
        (
            _Place("GEMM", LATER, 132),
            _Place("GEMM", LATER, 132, processors=112),
            _Place("GEMM", LATER, 132, processors=112),
            _Place("GEMM", LATER, 66, processors=120),
        ),
    ),
    (
        128,
        (
            _PACKED,
            _PACKED,
            _Place("GEMM", LATER),
            _Place("GEMM", LATER, 132, processors=112),
        ),
    ),
    (
        512,
        (
            _PACKED,
            _Place("GEMM", LATER, 132, processors=112),
            _Place("GEMM", SAME),
            _Place("GEMM", SAME),
        ),
    ),
)
#: more rows, and long segments: not measured in other places
_MANY_ROWS = _Place("branch", SOONER)


def site_tuning(in_features: int, out_features: int, rows: int, tile_rows: int) -> SiteTuning:
    """How a site is computed in a step of `rows` padded rows. The split of K does not depend on
    `rows`."""
    shrink, delta = shrink_tuning(in_features, tile_rows), delta_tuning(out_features, tile_rows)
    if tile_rows == PREFILL_TILE_ROWS:
        return SiteTuning(shrink, delta)
    place = _place(in_features, out_features, rows)
    return SiteTuning(
        replace(shrink, programs=place.programs, packed=place.packed),
        replace(delta, programs=place.programs, packed=place.packed),
        place.order,
        place.priority,
        place.processors,
    )


def _place(in_features: int, out_features: int, rows: int) -> _Place:
    for most, places in _PLACES:
        if rows <= most:
            return places[_like(in_features, out_features)]
    return _MANY_ROWS


def _like(in_features: int, out_features: int) -> int:
    """The site of the 8B shape that is most like this one: its index among qkv, o, gate_up, down
    (4096 → 6144, 4096 → 4096, 4096 → 28672, 14336 → 4096)."""
    if in_features >= 3 * out_features:
        return 3
    if out_features >= 5 * in_features:
        return 2
    return 0 if out_features > in_features else 1
