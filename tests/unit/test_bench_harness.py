"""The benchmark recorder: rows, goals, the last line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.shared.goals import GOALS, Goal
from benchmarks.shared.harness import Recorder, quantile


def test_row_holds_median_quantiles_and_goal(tmp_path: Path) -> None:
    recorder = Recorder("cpu", "desk", tmp_path)
    recorder.add("TPOT of three adapters / base", [1.0, 1.4, 1.2], "×", better="lower", peer=2.3)
    (line,) = (tmp_path / "desk" / "cpu.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["value"], row["n"], row["peer"], row["holds"]) == (1.2, 3, 2.3, True)
    assert row["p10"] == pytest.approx(1.04)
    assert row["goal"] == "≤ 1.3 ×"
    wanted = {"commit", "versions", "floor", "unit", "better", "p90", "load", "load_before"}
    assert wanted <= row.keys()


def test_goal_without_a_row_counts_against(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder("cpu", "desk", tmp_path)
    recorder.add("first token, second run", [3.0], "s", better="lower")
    recorder.add("a row without a goal", [3.0], "s", better="lower")
    assert recorder.finish() == 1
    out = capsys.readouterr().out
    assert out.count("MISSING") == 4
    assert out.splitlines()[-1] == "cpu: 1 of 5 goals hold"


def test_missed_goal_does_not_hold(tmp_path: Path) -> None:
    recorder = Recorder("cpu", "desk", tmp_path)
    row = recorder.add("first token, second run", [15.1], "s", better="lower")
    assert row.holds is False


def test_new_recorder_replaces_the_old_rows(tmp_path: Path) -> None:
    Recorder("cpu", "desk", tmp_path).add("x", [1.0], "s", better="lower")
    recorder = Recorder("cpu", "desk", tmp_path)
    assert recorder.path.read_text() == ""


@pytest.mark.parametrize(("better", "measured", "holds"), [
    ("higher", 0.99, False), ("higher", 1.0, True), ("lower", 1.0, True), ("lower", 1.01, False),
])  # fmt: skip
def test_goal_compares_in_its_direction(better: str, measured: float, holds: bool) -> None:
    assert Goal("x", "y", better, 1.0, "s").holds(measured) is holds


def test_cases_of_one_bench_are_distinct() -> None:
    keys = [(goal.bench, goal.case) for goal in GOALS]
    assert len(keys) == len(set(keys))


def test_quantile_lies_between_neighbours() -> None:
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([5.0], 0.9) == 5.0
