"""What `make bench-fairness` records of a cell, and of all of them."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.fairness.crowd import Cell
from benchmarks.fairness.meter import Measured
from benchmarks.fairness.sim import (
    CAP_ALONE,
    FIELD_SKIP,
    FIELD_SLICE,
    NO_CAP,
    SKIP,
    SLICE,
    TURNS,
    wait_bound_steps,
)
from benchmarks.shared.harness import Recorder


def record_cell(recorder: Recorder, cell: Cell, policies: Mapping[str, Measured]) -> None:
    bound = wait_bound_steps(cell)
    for name, one in policies.items():
        case = f"{cell.name}, {name}"
        for what, value, unit, better in (
            ("Jain index", one.jain, "", "higher"),
            ("rounds", one.rounds, "", "higher"),
            ("worst wait / bound", one.worst_wait_steps / bound, "×", "lower"),
            ("worst wait", one.worst_wait_steps, "steps", "lower"),
            ("p99 wait", one.p99_wait_steps, "steps", "lower"),
            ("worst wait in time", one.worst_wait_s, "s", "lower"),
            ("steps at full batch", 100 * one.full_batch_share, "%", "higher"),
            ("adapters a step", one.adapters_a_step, "", "higher"),
            ("swaps in 1,000 steps", one.swaps_a_thousand, "", "lower"),
            ("pauses in 1,000 steps", one.pauses_a_thousand, "", "lower"),
        ):
            recorder.add(f"{case}: {what}", [value], unit, better=better)


def record_traces(recorder: Recorder, cell: Cell, seconds: Mapping[str, float]) -> None:
    """Against the better baseline: as the field swaps, and with loraplex's copies."""
    ours, cap = seconds[TURNS], seconds[CAP_ALONE]
    for name, value in seconds.items():
        recorder.add(f"{cell.name}, {name}: finite trace", [value], "s", better="lower")
    field = min(seconds[FIELD_SKIP], seconds[FIELD_SLICE])
    equal = min(seconds[SKIP], seconds[SLICE])
    for what, peer in (("baseline", field), ("baseline with own copies", equal)):
        recorder.add(f"{cell.name}: finite trace / {what}", [ours / peer], "×", better="lower")
    for what, ratio in (("cap", cap / seconds[NO_CAP]), ("scheduler", ours / cap)):
        recorder.add(f"{cell.name}: price of the {what}", [ratio], "×", better="lower")


def record_long(recorder: Recorder, cell: Cell, one: Measured) -> None:
    bound, case = wait_bound_steps(cell), f"{cell.name}, {one.steps} steps"
    recorder.add(f"{case}: Jain index", [one.jain], "", better="higher")
    ratio = one.worst_wait_steps / bound
    recorder.add(f"{case}: worst wait / bound", [ratio], "×", better="lower")


def record_promises(recorder: Recorder, ours: Mapping[Cell, Measured]) -> None:
    """Over all cells of loraplex's own."""
    ratio = max(one.worst_wait_steps / wait_bound_steps(cell) for cell, one in ours.items())
    recorder.add("worst wait / bound, all cells", [ratio], "×", better="lower")
    fairest = min(one.jain for one in ours.values())
    recorder.add("smallest Jain index, all cells", [fairest], "", better="higher")
    rounds = min(one.rounds for one in ours.values())
    recorder.add("fewest rounds, all cells", [rounds], "rounds", better="higher")
