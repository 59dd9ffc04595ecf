"""What `ops --choose` tries at every site: forms of the two kernels, their grids, their order and
priority beside the base GEMM."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.ops_layers import Choice
from kernels.lora_site_tuning import LATER, SAME, SOONER
from kernels.lora_tuning import DeltaTuning, ShrinkTuning

#: forms: one read of 16 rows of 1024 inputs, or four of 256, products in steps of 128 or 256
WIDE = ShrinkTuning(1024, 1024, 528, 4, 8, few_rows=4)
PARTS = ShrinkTuning(1024, 256, 528, 4, 4, dot_k=128, num_stages=4, few_rows=4)
LONG_PARTS = replace(PARTS, dot_k=256, registers=168)
NARROW_DELTA = DeltaTuning(1024, 256, 528, 4, few_rows=4)
WIDE_DELTA = DeltaTuning(2048, 512, 264, 8, few_rows=4)


def choice(
    order: str = "branch",
    priority: int = SOONER,
    *,
    programs: int = 0,
    few_rows: int = 4,
    packed: bool = False,
    early: bool = True,
    leads: bool = True,
    processors: int = 0,
    shrink: ShrinkTuning = PARTS,
    delta: DeltaTuning = NARROW_DELTA,
) -> Choice:
    """Args: programs, of both kernels; 0: as their forms have them."""
    return Choice(
        replace(
            shrink,
            programs=programs or shrink.programs,
            few_rows=few_rows,
            packed=packed,
            leads=leads,
        ),
        replace(
            delta,
            programs=programs or delta.programs,
            few_rows=few_rows,
            packed=packed,
            early=early,
        ),
        order,
        priority,
        processors,
    )


CHOICES: dict[str, Choice] = {
    "in force": Choice(),
    "few 1": choice(few_rows=1),
    "few 4": choice(),
    "few 8": choice(few_rows=8),
    "few 16": choice(few_rows=16),
    "packed": choice(packed=True),
    "packed, few 8": choice(packed=True, few_rows=8),
    "late": choice(leads=False),
    "packed, late": choice(packed=True, leads=False),
    "plain": choice(early=False),
    "packed, plain": choice(packed=True, early=False),
    "264": choice(programs=264),
    "132": choice(programs=132),
    "66": choice(programs=66),
    "wide": choice(shrink=WIDE),
    "wide, packed 264": choice(shrink=WIDE, programs=264, packed=True),
    "long parts": choice(shrink=LONG_PARTS),
    "wide delta": choice(delta=WIDE_DELTA),
    "wide delta, packed": choice(delta=WIDE_DELTA, packed=True),
    "GEMM, same, 528": choice("GEMM", SAME),
    "GEMM, same, 132": choice("GEMM", SAME, programs=132),
    "GEMM, same, 66": choice("GEMM", SAME, programs=66),
    "GEMM, same, 33": choice("GEMM", SAME, programs=33),
    "GEMM, same, 16": choice("GEMM", SAME, programs=16),
    "GEMM, later, 528": choice("GEMM", LATER),
    "GEMM, later, 132": choice("GEMM", LATER, programs=132),
    "GEMM, later, 66": choice("GEMM", LATER, programs=66),
    "GEMM, later, 33": choice("GEMM", LATER, programs=33),
    "GEMM, sooner, packed": choice("GEMM", SOONER, packed=True),
    "GEMM, same, 66, plain": choice("GEMM", SAME, programs=66, early=False),
    "branch, same, packed": choice("branch", SAME, packed=True),
    "branch, same, 132": choice("branch", SAME, programs=132),
    "shrink, sooner, plain": choice("shrink", SOONER, early=False),
    "shrink, same, packed": choice("shrink", SAME, packed=True),
    "after": choice("after"),
    "packed, 120 processors": choice(packed=True, processors=120),
    "packed, 112 processors": choice(packed=True, processors=112),
    "GEMM, later, 66, 120 processors": choice("GEMM", LATER, programs=66, processors=120),
    "GEMM, later, 132, 112 processors": choice("GEMM", LATER, programs=132, processors=112),
    "GEMM, same, 33, 124 processors": choice("GEMM", SAME, programs=33, processors=124),
}
