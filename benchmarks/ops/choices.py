"""What `ops --choose` tries at every site: order, priority, grid, and how many multiprocessors the
base GEMM is chosen for."""

from __future__ import annotations

from benchmarks.ops.layers import Choice
from kernels.lora_site_tuning import LATER, SAME, SOONER, Place

CHOICES: dict[str, Choice] = {
    "in force": Choice(),
    **{
        name: Choice(place=place)
        for name, place in {
            "branch, sooner": Place("branch", SOONER),
            "branch, same": Place("branch", SAME),
            "GEMM, same, 33": Place("GEMM", SAME, 33),
            "GEMM, later": Place("GEMM", LATER),
        }.items()
    },
    **{
        f"GEMM, later, {programs}, {deltas}, {processors} processors": Choice(
            place=Place("GEMM", LATER, programs, processors, deltas)
        )
        for programs, deltas, processors in (
            (66, 66, 76), (132, 132, 112), (132, 132, 76), (132, 528, 112), (264, 264, 112),
            (264, 264, 76), (528, 528, 120), (528, 528, 112), (528, 528, 100), (528, 528, 88),
            (528, 528, 76), (528, 528, 66), (528, 528, 56), (528, 528, 44), (528, 1056, 120),
            (528, 1056, 112), (528, 1056, 100), (528, 1056, 88), (528, 1056, 76), (528, 1056, 66),
            (528, 1056, 44),
        )
    },
}  # fmt: skip
