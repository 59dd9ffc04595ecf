"""One way to record a benchmark: rows in a file for each machine, goals in one table, a last line.

recorder = Recorder("cpu")
recorder.add("TPOT of the base", samples, "ms", better="lower")
sys.exit(recorder.finish())
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.shared.goals import goals_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
#: for rows of a part of a benchmark or of a dry run
PARTIAL = ROOT / ".loraplex" / "benchmarks"
PACKAGES = ("torch", "triton", "numpy", "transformers", "peft", "grpcio")


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number. `value` is the median of n samples; p10 and p90 are theirs.

    `floor` is what the hardware allows and `peer` what another program needs, in the same unit.
    """

    case: str
    value: float
    unit: str
    better: str
    n: int
    p10: float
    p90: float
    floor: float | None
    peer: float | None
    goal: str | None
    holds: bool | None
    commit: str
    versions: dict[str, str]
    #: 1-minute load averages: when the benchmark began, before its own work, and at this row
    load_before: float
    load: float


class Recorder:
    """Collects the rows of one benchmark and writes each at once; an old file is replaced."""

    def __init__(self, name: str, hardware: str = "", results: Path = RESULTS) -> None:
        self.name = name
        self.rows: list[Row] = []
        self._goals = goals_of(name)
        self._commit, self._versions = commit(), versions()
        self._load_before = os.getloadavg()[0]
        self.path = results / (hardware or cpu_name()) / f"{name}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def add(
        self,
        case: str,
        samples: Sequence[float],
        unit: str,
        *,
        better: str,
        floor: float | None = None,
        peer: float | None = None,
    ) -> Row:
        """Record the median of `samples` (at least one) and print it."""
        ordered = sorted(samples)
        value, goal = statistics.median(ordered), self._goals.get(case)
        row = Row(
            case=case,
            value=value,
            unit=unit,
            better=better,
            n=len(ordered),
            p10=quantile(ordered, 0.1),
            p90=quantile(ordered, 0.9),
            floor=floor,
            peer=peer,
            goal=str(goal) if goal else None,
            holds=goal.holds(value) if goal else None,
            commit=self._commit,
            versions=self._versions,
            load_before=self._load_before,
            load=os.getloadavg()[0],
        )
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
        print(_line(row), flush=True)
        return row

    def finish(self) -> int:
        """Print what is missing and the last line; 0 when every goal holds, else 1."""
        measured = {row.case for row in self.rows}
        for case, goal in self._goals.items():
            if case not in measured:
                print(f"{case:<44} MISSING   goal {goal}")
        met = sum(row.holds is True for row in self.rows)
        print(f"{self.name}: {met} of {len(self._goals)} goals hold", flush=True)
        return 0 if met == len(self._goals) else 1


def end_on_signals() -> None:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, so that started processes are ended."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the ordered samples lie, linear between neighbours."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def cpu_name() -> str:
    """A folder's name for this machine: processor and cores that this process may use."""
    text = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    model = found.group(1) if found else platform.machine()
    model = re.sub(r"\(R\)|\(TM\)|CPU|Processor|@.*", " ", model)
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    return f"{slug}-{len(os.sched_getaffinity(0))}-cores"


def commit() -> str:
    """Short id, with "-dirty" where tracked files differ; outside git what BENCH_COMMIT says."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BENCH_COMMIT", "unknown")
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _line(row: Row) -> str:
    parts = [f"{row.case:<44} {row.value:9.2f} {row.unit:<7}"]
    if row.n > 1:
        parts.append(f"p10 {row.p10:.2f} p90 {row.p90:.2f} n {row.n}")
    if row.peer is not None:
        parts.append(f"peer {row.peer:.2f}")
    if row.goal is not None:
        parts.append(f"goal {row.goal}: {'holds' if row.holds else 'NOT MET'}")
    return "  ".join(parts)
