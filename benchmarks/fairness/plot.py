"""Who waits how long, as one picture: share of the adapters by their longest wait, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.fairness.crowd import Cell
from benchmarks.fairness.meter import Measured

#: one behind the other where they are equal: the widest first
_STYLES = (("#1b6ca8", 2.2, "-"), ("#e59866", 3.6, "-"), ("#922b21", 1.4, "--"))


class PlotUnavailable(RuntimeError):
    """There is nothing to draw with; the message says what to install."""


def check() -> None:
    """Before minutes of work. Raises: PlotUnavailable."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotUnavailable(
            "the plot needs matplotlib: pip install -e '.[bench]', or leave it out by --no-plot"
        ) from error


def plot(
    path: Path,
    measured: Mapping[Cell, Mapping[str, Measured]],
    bounds: Mapping[Cell, int],
) -> None:
    """Write a PNG: one row of panels for uniform, one for Zipf popularity."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    columns = sorted({cell.max_loras for cell in measured})
    rows = sorted({cell.zipf for cell in measured})
    size = (3.2 * len(columns) + 0.6, 2.6 * len(rows) + 1.0)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False, sharey=True)
    for cell, policies in measured.items():
        axis = axes[rows.index(cell.zipf)][columns.index(cell.max_loras)]
        for (color, width, style), (name, one) in zip(_STYLES, policies.items(), strict=True):
            waits = [max(1, wait) for wait in one.longest_waits]
            # down to 0 at the left edge: all adapters wait longer than the luckiest
            axis.plot(
                [waits[0], *waits], [0, *range(101)], style, color=color, linewidth=width,
                label=name, solid_capstyle="butt",
            )  # fmt: skip
        axis.axvline(bounds[cell], color="#444", linestyle=":", linewidth=1.4, label="bound")
        axis.set(xscale="log", xlim=(10, 1.5 * _longest(measured)), ylim=(-2, 102))
        axis.set_title(cell.name, fontsize=10)
        axis.yaxis.set_major_formatter(PercentFormatter())
        axis.grid(which="major", color="#ddd", linewidth=0.6)
    figure.supxlabel("longest wait for the next token, steps", fontsize=10)
    figure.supylabel("adapters that never waited longer", fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _longest(measured: Mapping[Cell, Mapping[str, Measured]]) -> int:
    """The longest run: nobody waited longer."""
    return max(one.steps for policies in measured.values() for one in policies.values())
