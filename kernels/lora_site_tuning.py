"""How a site's launches stand beside its base GEMM, by the site's shape and a step's padded rows.

Both are fixed in a captured graph: which adapters the rows have, and how many, decides nothing.
`make bench-ops ARGS=--choose` measures the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.lora_tables import PREFILL_TILE_ROWS
from kernels.lora_tuning import DeltaTuning, ShrinkTuning, delta_tuning, num_splits, shrink_tuning

#: of a site's branch beside its GEMM: which goes first where both could start
SOONER, SAME, LATER = -1, 0, 1
#: launches of a site: the pair on a branch, then the GEMM; the GEMM, then the pair on a branch; the
#: GEMM, then the pair behind it
ORDERS = ("branch", "GEMM", "after")


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
class Place:
    """How a site's launches stand beside its GEMM.

    Args: programs, of the shrink; delta_programs, 0: as the delta's own tuning has them, but no
    more than the shrink's; others as in SiteTuning and ShrinkTuning.
    """

    order: str
    priority: int
    programs: int = 528
    processors: int = 0
    delta_programs: int = 0

    def of(self, shrink: ShrinkTuning, delta: DeltaTuning) -> SiteTuning:
        delta_programs = self.delta_programs or min(self.programs, delta.programs)
        return SiteTuning(
            replace(shrink, programs=self.programs),
            replace(delta, programs=delta_programs),
            self.order,
            self.priority,
            self.processors,
        )


# From 26 candidates at each site, in-layer (H200, torch 2.11, triton 3.6, 8B shape, commits
# 84b6c30, b9a1d40, 806477f, fad2fdf), at 1 to 1024 rows: each row of the table has the least sum of
# time / goal over the cells of benchmarks.ops.choose with so many rows, and where sums were alike
# what serves the cell that is furthest from its goal. A GEMM for half of the multiprocessors loses
# little as long as it waits for memory, and leaves LoRA the other half: kernels of both never share
# one, since cuBLAS's take all of its registers.
# Each: most padded rows, then qkv, o, gate_up, down.
_PLACES: tuple[tuple[int, tuple[Place, Place, Place, Place]], ...] = (
    (
        2,
        (
            Place("GEMM", LATER, processors=56),
            Place("GEMM", LATER, 132, processors=76),
            Place("GEMM", LATER, 132, processors=112, delta_programs=528),
            Place("GEMM", LATER, processors=66),
        ),
    ),
    (
        16,
        (
            Place("GEMM", LATER, processors=56),
            Place("GEMM", LATER, processors=76),
            Place("GEMM", LATER, 264, processors=112),
            Place("GEMM", LATER, processors=66),
        ),
    ),
    (
        48,
        (
            Place("GEMM", LATER, processors=56),
            Place("GEMM", LATER, processors=66),
            Place("GEMM", LATER, processors=120, delta_programs=1056),
            Place("GEMM", LATER, processors=66),
        ),
    ),
    (
        96,
        (
            Place("GEMM", LATER, processors=44),
            Place("GEMM", LATER, processors=56),
            Place("GEMM", LATER, processors=88, delta_programs=1056),
            Place("GEMM", LATER, processors=66),
        ),
    ),
    (
        160,
        (
            Place("GEMM", LATER, processors=56),
            Place("GEMM", LATER, processors=76),
            Place("GEMM", LATER, processors=88, delta_programs=1056),
            Place("GEMM", LATER, processors=88),
        ),
    ),
    (
        256,
        (
            Place("GEMM", LATER, processors=66),
            Place("GEMM", LATER, processors=100),
            Place("GEMM", LATER, processors=120, delta_programs=1056),
            Place("GEMM", LATER, processors=112),
        ),
    ),
    (
        640,
        (
            Place("GEMM", LATER, processors=100, delta_programs=1056),
            Place("GEMM", LATER, processors=100),
            Place("GEMM", LATER, processors=120, delta_programs=1056),
            Place("GEMM", LATER, processors=100),
        ),
    ),
    (
        1024,
        (
            Place("GEMM", LATER, processors=100, delta_programs=1056),
            Place("GEMM", LATER, processors=100),
            Place("GEMM", LATER, processors=120, delta_programs=1056),
            Place("GEMM", LATER),
        ),
    ),
)
#: more rows: not measured in other places
_MANY_ROWS = Place("branch", SOONER)
#: long segments. The GEMM of down should not wait for the whole branch: 8192 rows of eight adapters
#: of rank 16, in-layer, 110 → 82 µs (commit 806477f); elsewhere both priorities are alike
_PREFILL_PRIORITIES = (SOONER, SOONER, SOONER, SAME)


def site_tuning(in_features: int, out_features: int, rows: int, tile_rows: int) -> SiteTuning:
    """How a site is computed in a step of `rows` padded rows. The split of K does not depend on
    `rows`."""
    shrink = shrink_tuning(in_features, tile_rows)
    delta = delta_tuning(out_features, tile_rows, num_splits(in_features, tile_rows))
    if tile_rows == PREFILL_TILE_ROWS:
        priority = _PREFILL_PRIORITIES[_like(in_features, out_features)]
        return SiteTuning(shrink, delta, priority=priority)
    return _place(in_features, out_features, rows).of(shrink, delta)


def _place(in_features: int, out_features: int, rows: int) -> Place:
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
