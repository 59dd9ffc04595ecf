"""`make bench-fairness`: the real core against the field's two policies, at scale.

10,000 registered adapters, 300 of them demanding for each place at any time, uniform and Zipf
popularity. The core is the product's own, driven by a simulated runner, slot writer, weights source
and clock (benchmarks/fairness/turns.py); all policies pay the same for a step
(benchmarks/fairness/policy.py has the costs and where they were measured).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from benchmarks import plan_cost
from benchmarks.fairness import plot as waits_plot
from benchmarks.fairness.crowd import Cell
from benchmarks.fairness.meter import Measured
from benchmarks.fairness.rows import record_cell, record_long, record_promises, record_traces
from benchmarks.fairness.sim import (
    POLICIES,
    TRACES,
    TURNS,
    run_closed,
    run_trace,
    wait_bound_steps,
)
from benchmarks.fairness.table import price_table, table
from benchmarks.shared.harness import PARTIAL, RESULTS, ROOT, Recorder

STEPS = 100_000
LONG_CELL, LONG_FACTOR = Cell(1, zipf=True), 10
MAX_LORAS = (1, 8, 32, 64)
PLOT = ROOT / "docs" / "fairness.png"

Result = TypeVar("Result")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fairness", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=STEPS, help="a cell; fewer: not recorded")
    parser.add_argument(
        "--max-loras", type=int, action="append", choices=MAX_LORAS, help="repeatable; default all"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    if not options.no_plot:
        waits_plot.check()
    places = options.max_loras or MAX_LORAS
    cells = [Cell(count, zipf) for count in places for zipf in (False, True)]
    whole = options.steps >= STEPS and set(places) == set(MAX_LORAS)
    # a part of the rows must not replace a whole run's
    recorder = Recorder("fairness", results=RESULTS if whole else PARTIAL)
    began = time.monotonic()
    simulate(recorder, cells, options.steps, options.jobs, plot_path(options.no_plot, whole))
    recorder.add("whole simulation", [time.monotonic() - began], "s", better="lower")
    plan_cost.record(recorder)
    return recorder.finish()


def plot_path(no_plot: bool, whole: bool) -> Path | None:
    if no_plot:
        return None
    return PLOT if whole else PARTIAL / "fairness.png"


def simulate(
    recorder: Recorder, cells: Sequence[Cell], steps: int, jobs: int, plot: Path | None
) -> None:
    """Every policy in every cell, on `jobs` processes."""
    with ProcessPoolExecutor(jobs) as pool:
        work = Work(pool, cells, steps)
        measured = {cell: {n: work.runs[cell, n].result() for n in POLICIES} for cell in cells}
        seconds = {cell: {n: work.traces[cell, n].result() for n in TRACES} for cell in cells}
        long_run = work.long_run.result()
    for cell in cells:
        record_cell(recorder, cell, measured[cell])
        record_traces(recorder, cell, seconds[cell])
    record_long(recorder, LONG_CELL, long_run)
    record_promises(recorder, {cell: policies[TURNS] for cell, policies in measured.items()})
    print(f"\n{table(measured)}\n\n{price_table(seconds)}\n")
    if plot is not None:
        bounds = {cell: wait_bound_steps(cell) for cell in cells}
        waits_plot.plot(plot, measured, bounds)
        print(f"plot: {plot}")


class Work:
    """What the processes are given, the longest first; each says on stderr when it is done."""

    def __init__(self, pool: Executor, cells: Sequence[Cell], steps: int) -> None:
        self._pool, self._began = pool, time.monotonic()
        self.runs: dict[tuple[Cell, str], Future[Measured]] = {}
        self.traces: dict[tuple[Cell, str], Future[float]] = {}
        by_length = sorted(cells, key=lambda cell: -cell.max_loras)
        for cell in by_length:
            self._run(TURNS, cell, steps)
            if cell == by_length[1]:
                name = f"{LONG_CELL.name}, {LONG_FACTOR * steps} steps"
                long_run = pool.submit(run_closed, TURNS, LONG_CELL, LONG_FACTOR * steps)
                self.long_run = self._told(name, long_run)
        for cell in by_length:
            for name in TRACES:
                trace = pool.submit(run_trace, name, cell)
                self.traces[cell, name] = self._told(f"{cell.name}, {name}, finite trace", trace)
            for name in POLICIES:
                if name != TURNS:
                    self._run(name, cell, steps)

    def _run(self, name: str, cell: Cell, steps: int) -> None:
        run = self._pool.submit(run_closed, name, cell, steps)
        self.runs[cell, name] = self._told(f"{cell.name}, {name}, {steps} steps", run)

    def _told(self, what: str, future: Future[Result]) -> Future[Result]:
        def tell(_: Future[Result]) -> None:
            print(f"{time.monotonic() - self._began:6.0f} s  {what}", file=sys.stderr, flush=True)

        future.add_done_callback(tell)
        return future


if __name__ == "__main__":
    sys.exit(main())
