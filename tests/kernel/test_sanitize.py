"""The run under compute-sanitizer: the tests that it names exist, and what it makes of a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernel import sanitize
from tests.support.waiting import eventually

#: finds one error in a program that is given as text, and in pytest as many as it is asked to
FAKE = """#!/bin/sh
echo "========= COMPUTE-SANITIZER"
case "$*" in
  *write_one_too_many*) echo "========= ERROR SUMMARY: {planted} errors" ;;
  *racecheck*) echo "========= RACECHECK SUMMARY: {found} hazards displayed (0 errors)" ;;
  *) echo "========= ERROR SUMMARY: {found} errors" ;;
esac
"""


def run_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, planted: int, found: int, tool: str
) -> int:
    monkeypatch.setattr(sanitize.signal, "signal", lambda *_: None)  # the test runner's stay
    fake = folder / "compute-sanitizer"
    fake.write_text(FAKE.format(planted=planted, found=found))
    fake.chmod(0o755)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    return sanitize.main(["--sanitizer", str(fake), "--logs", str(folder), "--tool", tool])


def test_every_named_test_exists_and_a_clean_report_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_with(tmp_path, monkeypatch, 1, 0, "memcheck") == 0, capsys.readouterr().out
    named = len(sanitize.MANY) + 1  # one of them stands for two
    assert f"{named} tests collected" in (tmp_path / "plain.txt").read_text()
    assert set(sanitize.FEW) < set(sanitize.MANY)


def test_a_finding_or_a_blind_tool_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "test_command", lambda tests: ["true", *tests])
    assert run_with(tmp_path, monkeypatch, 1, 2, "racecheck") == 1
    assert "racecheck: exit 0, 2 findings" in capsys.readouterr().out
    assert run_with(tmp_path, monkeypatch, 0, 0, "memcheck") == 1
    assert "the planted overrun was not found" in capsys.readouterr().out


def test_a_run_that_takes_too_long_is_killed_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, left = tmp_path / "log", tmp_path / "left"
    script = f"trap '' INT; sleep 60 & echo $! > {left}; exec sleep 60"
    monkeypatch.setattr(sanitize, "_LAST_WORDS_S", 0.1)
    outcome = sanitize.run(["sh", "-c", script], log, 0.5)
    assert outcome.status is None
    assert outcome.seconds < 10
    assert not outcome.is_clean
    assert eventually(lambda: not Path(f"/proc/{left.read_text().strip()}/fd/1").exists())


def test_a_run_past_its_limit_still_tells_what_was_found(tmp_path: Path) -> None:
    said = "========= ERROR SUMMARY: 3 errors"
    script = f"trap 'echo \"{said}\"; exit 1' INT; sleep 60 & wait"
    outcome = sanitize.run(["bash", "-c", script], tmp_path / "log", 0.5)
    assert (outcome.status, outcome.findings) == (None, 3)
