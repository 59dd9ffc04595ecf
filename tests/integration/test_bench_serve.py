"""`bench-serve` with its own registry and engine, tiny, on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.serve import __main__ as serve


def test_load_of_many_adapters_runs_on_a_database_that_was_filled_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database, tiny = tmp_path / "filled.sqlite", ["--shape", "tiny", "--device", "cpu"]
    assert serve.main([*tiny, "--prepare", str(database)]) == 0
    load = ["--rate", "15", "--seconds", "1.5", "--cut", "10", "--workers", "1"]
    parts = ["--only", "many", "--only", "places", "--only", "punica"]
    arguments = [*tiny, "--prepared", str(database), *parts, *load]
    assert serve.main([*arguments, "--results", str(tmp_path / "rows")]) == 0
    (path,) = (tmp_path / "rows").glob("*/serve-tiny.jsonl")
    rows = {row["case"]: row["value"] for row in map(json.loads, path.read_text().splitlines())}
    assert rows["8 adapters at 15/s: started, worst decile"] == 1.0
    assert rows["8 adapters at 15/s: finished"] > 1
    assert rows["start to SERVING, dummy weights"] > 0
    assert rows["8 adapters at 15/s, 16 places: started, worst decile"] == 1.0
    assert rows["Punica's load at 15/s, distinct: started, all"] == 1.0
    assert rows["Punica's load: TPOT, distinct / identical"] > 0
    printed = capsys.readouterr().out
    assert printed.count("decile") >= 6
    assert not re.search(r"^\d+ × ", printed, re.MULTILINE), "a request failed"
