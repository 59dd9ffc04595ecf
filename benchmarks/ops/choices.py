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
            "branch, same, 132": Place("branch", SAME, 132),
            "branch, later": Place("branch", LATER),
            "shrink, same": Place("shrink", SAME),
            "after": Place("after", SOONER),
            "GEMM, same, 33": Place("GEMM", SAME, 33),
            "GEMM, same, 33, 124 processors": Place("GEMM", SAME, 33, processors=124),
            "GEMM, later": Place("GEMM", LATER),
        }.items()
    },
    **{
        f"GEMM, later, {programs}, {processors} processors": Choice(
            place=Place("GEMM", LATER, programs, processors)
        )
        for programs, processors in (
            (66, 0), (66, 120), (66, 76), (132, 112), (132, 76), (264, 112), (264, 76), (528, 120),
            (528, 112), (528, 100), (528, 88), (528, 76), (528, 66), (528, 56), (528, 44),
        )
    },
}  # fmt: skip
