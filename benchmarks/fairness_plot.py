"""The waits of each policy as one picture: share of the waits by length, a panel for each cell."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.fairness_crowd import Cell
from benchmarks.fairness_meter import Measured

_COLORS = ("#1b6ca8", "#c0392b", "#d68910")


class PlotUnavailable(RuntimeError):
    """There is nothing to draw with; the message says what to install."""


def check() -> None:
    """Before hours of work. Raises: PlotUnavailable."""
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

    columns = sorted({cell.max_loras for cell in measured})
    rows = sorted({cell.zipf for cell in measured})
    figure = Figure(figsize=(4 * len(columns), 3.2 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for cell, policies in measured.items():
        axis = axes[rows.index(cell.zipf)][columns.index(cell.max_loras)]
        for color, (name, one) in zip(_COLORS, policies.items(), strict=False):
            shares = [index / (len(one.wait_quantiles) - 1) for index in range(101)]
            waits = [max(1, wait) for wait in one.wait_quantiles]
            axis.step(waits, shares, color=color, label=name, where="post")
        axis.axvline(bounds[cell], color="#444", linestyle="--", linewidth=1, label="bound")
        axis.set_xscale("log")
        axis.set_title(cell.name, fontsize=10)
        axis.set_xlabel("steps without a token")
        axis.set_ylabel("share of waits")
    axes[0][0].legend(fontsize=7, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
