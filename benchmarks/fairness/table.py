"""The two tables that `make bench-fairness` ends with, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.fairness.crowd import Cell
from benchmarks.fairness.meter import Measured
from benchmarks.fairness.sim import CAP_ALONE, NO_CAP, TRACES, TURNS, wait_bound_steps


def table(results: Mapping[Cell, Mapping[str, Measured]]) -> str:
    """A row for each policy in each cell; swaps and pauses in 1,000 steps."""
    header = (
        "cell", "policy", "Jain", "rounds", "worst wait / bound", "p99 wait, steps",
        "full batch", "adapters a step", "swaps", "pauses",
    )  # fmt: skip
    rows = (
        (
            cell.name, name, f"{one.jain:.4f}", f"{one.rounds}",
            f"{one.worst_wait_steps} / {wait_bound_steps(cell)}", str(one.p99_wait_steps),
            f"{one.full_batch_share:.1%}", f"{one.adapters_a_step:.1f}",
            f"{one.swaps_a_thousand:.0f}", f"{one.pauses_a_thousand:.0f}",
        )
        for cell, policies in results.items()
        for name, one in policies.items()
    )  # fmt: skip
    return _markdown(header, rows)


def price_table(seconds: Mapping[Cell, Mapping[str, float]]) -> str:
    """Seconds to finish the same requests, and which part of loraplex's are the cap's."""
    header = ("cell", *(f"{name}, s" for name in TRACES), "price: cap", "scheduler")
    rows = (
        (
            cell.name,
            *(f"{one[name]:.1f}" for name in TRACES),
            f"{one[CAP_ALONE] / one[NO_CAP]:.2f} ×",
            f"{one[TURNS] / one[CAP_ALONE]:.2f} ×",
        )
        for cell, one in seconds.items()
    )
    return _markdown(header, rows)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
