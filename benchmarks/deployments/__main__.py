"""`make bench-deployments`: three adapters of the demo model, served in three ways one after the
other: what each costs, how fast it is, and what a flood or a new version does.

Arrivals are open loop and the same for all three. Every engine may use all cores, as by default.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployments.fleets import (
    Fleet,
    MergedEngines,
    OneEngine,
    SeparateEngines,
    changed_copy,
    first_token,
)
from benchmarks.deployments.open_loop import Answer, Arrival, poisson, run_open_loop
from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder, Row, end_on_signals
from benchmarks.shared.load import Stream, demo_streams
from benchmarks.shared.process_memory import MIB
from examples.demo_stack import ADAPTERS, ADAPTERS_DIR, Stack, convert_model

REGISTRY_ARGS = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
FLEETS: tuple[type[Fleet], ...] = (SeparateEngines, OneEngine, MergedEngines)
NUM_STREAMS = 12
NUM_TOKENS = 32
LOW_PER_S, HIGH_PER_S = 0.5, 1.5
FLOOD_PER_S, OTHERS_PER_S = 4.0, 1.0
FLOODED = ADAPTERS[0]
SEED = 20261129


@dataclass(frozen=True, slots=True)
class Size:
    """Rounds of all streams at once, seconds of each rate, and updates."""

    rounds: int
    low_s: float
    high_s: float
    flood_s: float
    updates: int


FULL, QUICK = Size(3, 30.0, 20.0, 15.0, 3), Size(1, 6.0, 6.0, 6.0, 1)
METRICS = (
    "memory of the engines", "tokens a second, 12 streams", "TTFT, 0.5 requests/s",
    "TPOT, 0.5 requests/s", "TTFT, 1.5 requests/s", "TPOT, 1.5 requests/s",
    "TTFT of the others in a flood", "new version to its first token",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.deployments", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a dry run; rows go elsewhere")
    options = parser.parse_args()
    end_on_signals()
    size = QUICK if options.quick else FULL
    recorder = Recorder("deployments", results=PARTIAL if options.quick else RESULTS)
    convert_model()
    # one folder for all, in the first level of the temporary folder: sockets have short names
    with (
        tempfile.TemporaryDirectory(prefix="lpx-bench-") as scratch,
        Stack(Path(scratch), quiet=True) as registry,
    ):
        registry.start_registry(*REGISTRY_ARGS)
        registry.add_base_model()
        registry.publish()
        for kind in FLEETS:
            with kind(registry) as fleet:
                measure(recorder, fleet, size, Path(scratch))
    print(f"\n{table(recorder.rows)}\n")
    return recorder.finish()


def measure(recorder: Recorder, fleet: Fleet, size: Size, scratch: Path) -> None:
    """All rows of one way to serve, warm: every adapter has answered once."""

    def add(metric: str, samples: Sequence[float], unit: str, better: str = "lower") -> None:
        recorder.add(f"{fleet.name}: {metric}", samples, unit, better=better)

    for target in fleet.targets.values():
        first_token(target)
    memory, full, ttft_low, tpot_low, ttft_high, tpot_high, flooded, update = METRICS
    add(memory, [fleet.pss_bytes() / MIB], "MiB")
    streams = demo_streams(NUM_STREAMS)
    add(full, [_tokens_per_s(fleet, streams) for _ in range(size.rounds)], "tokens/s", "higher")
    for per_s, seconds, ttft, tpot in (
        (LOW_PER_S, size.low_s, ttft_low, tpot_low),
        (HIGH_PER_S, size.high_s, ttft_high, tpot_high),
    ):
        arrivals = poisson(streams, per_s, seconds, SEED)
        answers = run_open_loop(fleet.targets, arrivals, NUM_TOKENS)
        add(ttft, [1000 * answer.ttft_s for answer in answers], "ms")
        add(tpot, [1000 * answer.tpot_s for answer in answers], "ms")
    others = _under_flood(fleet, streams, size.flood_s)
    add(flooded, [1000 * answer.ttft_s for answer in others], "ms")
    add(update, _updates_s(fleet, size.updates, scratch), "s")


def table(rows: Sequence[Row]) -> str:
    """Markdown: a row a metric, a column a way to serve; medians."""
    values = {row.case: f"{_short(row.value)} {row.unit}" for row in rows}
    names = [kind.name for kind in FLEETS]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for metric in METRICS:
        cells = [values.get(f"{name}: {metric}", "-") for name in names]
        lines.append(f"| {metric} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _tokens_per_s(fleet: Fleet, streams: Sequence[Stream]) -> float:
    """All streams at once, until the last has its tokens."""
    began = time.monotonic()
    answers = run_open_loop(fleet.targets, [Arrival(0.0, one) for one in streams], NUM_TOKENS)
    return sum(answer.tokens for answer in answers) / (time.monotonic() - began)


def _updates_s(fleet: Fleet, count: int, scratch: Path) -> list[float]:
    """New contents, each of which no registry has seen."""
    found = []
    first = 1 + count * FLEETS.index(type(fleet))
    for change in range(first, first + count):
        folder = changed_copy(ADAPTERS_DIR / FLOODED, scratch / f"change-{change}", change)
        found.append(fleet.update_s(FLOODED, folder))
    return found


def _under_flood(fleet: Fleet, streams: Sequence[Stream], seconds: float) -> tuple[Answer, ...]:
    """Answers of the adapters that are not flooded."""
    flooded = [stream for stream in streams if stream.model == FLOODED]
    quiet = [stream for stream in streams if stream.model != FLOODED]
    flood = poisson(flooded, FLOOD_PER_S, seconds, SEED)
    others = poisson(quiet, OTHERS_PER_S, seconds, SEED + 1)
    with ThreadPoolExecutor(1) as pool:
        noise = pool.submit(run_open_loop, fleet.targets, flood, NUM_TOKENS, seconds)
        answers = run_open_loop(fleet.targets, others, NUM_TOKENS)
        noise.result()
    return answers


if __name__ == "__main__":
    sys.exit(main())
