"""`make bench-fairness`: the real core against the field's two policies, at scale.

10,000 registered adapters, 300 of them demanding for each place at any time, uniform and Zipf
popularity. The core is the product's own, driven by a simulated runner, slot writer, weights source
and clock (benchmarks/fairness_engine.py); the policies pay the same for a step
(benchmarks/fairness_policy.py has the costs and where they were measured).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor

from benchmarks import fairness_plot
from benchmarks.fairness_crowd import Cell
from benchmarks.fairness_meter import Measured
from benchmarks.fairness_sim import (
    POLICIES,
    SKIP,
    SKIP_COPY,
    SLICE,
    SLICE_COPY,
    TURNS,
    run_closed,
    run_trace,
    wait_bound_steps,
)
from benchmarks.harness import RESULTS, ROOT, Recorder
from benchmarks.plan_cost import measure

STEPS = 100_000
LONG_CELL, LONG_FACTOR = Cell(1, zipf=True), 10
MAX_LORAS = (1, 8, 32, 64)
PLANNED_STEPS = 600
TRACES = (TURNS, SKIP, SLICE, SKIP_COPY, SLICE_COPY)
PARTIAL = ROOT / ".loraplex" / "benchmarks"

Results = Mapping[Cell, Mapping[str, Measured]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="a cell; fewer: not recorded")
    parser.add_argument(
        "--max-loras", type=int, action="append", choices=MAX_LORAS, help="repeatable; default all"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    if not options.no_plot:
        fairness_plot.check()
    places = options.max_loras or MAX_LORAS
    cells = [Cell(count, zipf) for count in places for zipf in (False, True)]
    whole = options.steps >= STEPS and len(places) == len(MAX_LORAS)
    # a part of the rows must not replace a whole run's
    recorder = Recorder("fairness", results=RESULTS if whole else PARTIAL)
    with ProcessPoolExecutor(options.jobs) as pool:
        long_run = pool.submit(run_closed, TURNS, LONG_CELL, LONG_FACTOR * options.steps)
        runs = {
            (cell, name): pool.submit(run_closed, name, cell, options.steps)
            for cell in reversed(cells)
            for name in POLICIES
        }
        traces = {
            (cell, name): pool.submit(run_trace, name, cell) for cell in cells for name in TRACES
        }
        results = {cell: {name: runs[cell, name].result() for name in POLICIES} for cell in cells}
        for cell in cells:
            record_cell(recorder, cell, results[cell])
            record_traces(recorder, cell, {name: traces[cell, name].result() for name in TRACES})
        record_long(recorder, long_run.result())
    planning = measure(num_flows=10_000, max_loras=64, num_steps=PLANNED_STEPS)
    median_us = float(str(planning["plan_us_median"]))
    recorder.add("planning, 256 sequences, 10,000 flows", [median_us], "µs", better="lower")
    record_worst(recorder, results)
    if not options.no_plot:
        bounds = {cell: wait_bound_steps(cell) for cell in cells}
        fairness_plot.plot(recorder.path.with_suffix(".png"), results, bounds)
    print("\n" + table(results))
    return recorder.finish()


def record_cell(recorder: Recorder, cell: Cell, policies: Mapping[str, Measured]) -> None:
    bound = wait_bound_steps(cell)
    for name, one in policies.items():
        case = f"{cell.name}, {name}"
        for what, value, unit, better, floor in (
            ("Jain index", one.jain, "", "higher", None),
            ("rounds", one.rounds, "", "higher", None),
            ("worst wait / bound", one.worst_wait_steps / bound, "×", "lower", None),
            ("worst wait", one.worst_wait_steps, "steps", "lower", bound),
            ("p99 wait", one.p99_wait_steps, "steps", "lower", None),
            ("worst wait in time", one.worst_wait_s, "s", "lower", None),
            ("steps at full batch", 100 * one.full_batch_share, "%", "higher", None),
            ("adapters a step", one.adapters_a_step, "", "higher", cell.max_loras),
            ("swaps in 1,000 steps", one.swaps_a_thousand, "", "lower", None),
            ("pauses in 1,000 steps", one.pauses_a_thousand, "", "lower", None),
        ):
            recorder.add(f"{case}: {what}", [value], unit, better=better, floor=floor)


def record_traces(recorder: Recorder, cell: Cell, seconds: Mapping[str, float]) -> None:
    """Against the better baseline: as the field swaps, and with loraplex's copies."""
    ours = seconds[TURNS]
    for name, value in seconds.items():
        recorder.add(f"{cell.name}, {name}: finite trace", [value], "s", better="lower")
    field = min(seconds[SKIP], seconds[SLICE])
    equal = min(seconds[SKIP_COPY], seconds[SLICE_COPY])
    for what, peer in (("baseline", field), ("baseline with own copies", equal)):
        case = f"{cell.name}: finite trace / {what}"
        recorder.add(case, [ours / peer], "×", better="lower")


def record_long(recorder: Recorder, one: Measured) -> None:
    bound, case = wait_bound_steps(LONG_CELL), f"{LONG_CELL.name}, {one.steps} steps"
    recorder.add(f"{case}: Jain index", [one.jain], "", better="higher")
    ratio = one.worst_wait_steps / bound
    recorder.add(f"{case}: worst wait / bound", [ratio], "×", better="lower", floor=None)


def record_worst(recorder: Recorder, results: Results) -> None:
    """The promises, over all cells."""
    ours = {cell: policies[TURNS] for cell, policies in results.items()}
    ratio = max(one.worst_wait_steps / wait_bound_steps(cell) for cell, one in ours.items())
    recorder.add("worst wait / bound, all cells", [ratio], "×", better="lower")
    fairest = min((one.jain for one in ours.values()), default=math.nan)
    recorder.add("smallest Jain index, all cells", [fairest], "", better="higher")
    rounds = min((one.rounds for one in ours.values()), default=math.nan)
    recorder.add("fewest rounds, all cells", [rounds], "", better="higher")


def table(results: Results) -> str:
    """Markdown: a row for each policy in each cell."""
    header = (
        "cell", "policy", "Jain", "rounds", "worst wait / bound", "p99 wait, steps",
        "full batch", "adapters a step", "swaps", "pauses",
    )  # fmt: skip
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for cell, policies in results.items():
        bound = wait_bound_steps(cell)
        for name, one in policies.items():
            cells = (
                cell.name, name, f"{one.jain:.4f}", f"{one.rounds:.0f}",
                f"{one.worst_wait_steps} / {bound}", str(one.p99_wait_steps),
                f"{one.full_batch_share:.1%}", f"{one.adapters_a_step:.1f}",
                f"{one.swaps_a_thousand:.0f}", f"{one.pauses_a_thousand:.0f}",
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
