"""What adapters add to a layer of the 8B shape: shrink, delta and the consumer's add, on a GPU.

    python -m benchmarks.ops [--quick] [--peers DIR] [--results DIR]   # measure and judge
    python -m benchmarks.ops --sweep [--seconds N]                     # try tuning candidates
    python -m benchmarks.ops --choose [--seconds N]                    # try orders and grids

Two rows a cell. *in-layer*: a graph of a few layers with adapters minus the same without, replays
interleaved, adapters on a branch beside the base GEMM. *pair*: shrink and delta alone after a
flush of the caches, as other projects measure theirs. Every cell is compared with fp32 first; a
wrong one prints FAIL and has no row, so that its goal is missed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.ops.bench import Bench
from benchmarks.ops.clock import Clock, CudaClock, HostClock
from benchmarks.ops.layers import ERROR_LIMIT
from benchmarks.ops.shapes import (
    LLAMA_8B,
    PREFILL_ROWS,
    TINY,
    Cell,
    cell,
)
from benchmarks.shared.harness import RESULTS, Recorder
from kernels.lora_tables import PREFILL_TILE_ROWS

RANKS: tuple[int | str, ...] = (8, 16, 32, 64, 128, "mixed")
POPULARITIES = ("identical", "uniform-8", "Zipf", "distinct")
DECODE_TOKENS = (1, 8, 32, 64, 128, 256)
PREFILL_TOKENS = (512, 2048, 8192)
#: the cells that have goals
QUICK = (
    (1, "identical", 16), (8, "distinct", 16), (64, "identical", 16), (64, "uniform-8", 16),
    (64, "distinct", 16), (64, "uniform-8", "mixed"), (64, "distinct", "mixed"),
    (256, "Zipf", 16), (256, "distinct", 16), (8192, "uniform-8", 16),
)  # fmt: skip
TINY_CELLS = (
    Cell(5, "tiny", "mixed", (1, 4), (5, 24)),
    Cell(21, "tiny prefill", "mixed", (18, 3), (8, 17), True, PREFILL_TILE_ROWS),
)
#: 32 rows: one adapter, three, one each; ranks equal or by size
FRAGMENTS = {"32": (32,), "20+8+4": (20, 8, 4), "32 × 1": (1,) * 32}
FRAGMENT_RANKS = {"ranks 16": (16, 16, 16), "ranks 8/16/64": (8, 16, 64)}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when everything is right and every goal holds."""
    options = parser().parse_args(argv)
    clock: Clock = HostClock() if options.dry_run else CudaClock()
    if options.compile_part:
        from benchmarks.ops.sweep import compile_part

        compile_part(clock, options.compile_part, sweep=options.sweep)
        return 0
    started = time.monotonic()
    if not options.dry_run:
        compile_all("--sweep" if options.sweep else "")
    sites, dtype = (TINY, torch.float32) if options.dry_run else (LLAMA_8B, torch.bfloat16)
    num_layers, repeats = (1, 1) if options.dry_run else (8, 15 if options.quick else 25)
    bench = Bench(clock, sites, dtype, num_layers, repeats)
    if options.sweep:
        from benchmarks.ops.sweep import sweep

        return sweep(bench, options.seconds, options.results)
    if options.choose:
        return choose_sites(bench, options)
    return measure(bench, options, started)


def choose_sites(bench: Bench, options: argparse.Namespace) -> int:
    from benchmarks.ops.choose import choose

    if not options.dry_run:
        return choose(bench, options.seconds, options.results)
    from benchmarks.ops.choices import CHOICES

    choices = {name: CHOICES[name] for name in ("in force", "branch, same", "GEMM, later")}
    return choose(bench, options.seconds, options.results, ((TINY_CELLS[0], 1.0),), choices)


def measure(bench: Bench, options: argparse.Namespace, started: float) -> int:
    name = "ops-dry-run" if options.dry_run else "ops"
    recorder = Recorder(name, hardware(bench.clock.device), options.results)
    recorder.add("copy", [bench.copy_bytes_a_us / 1e6], "TB/s", better="higher")
    wrong = 0
    shapes = [cell(*each) for each in QUICK]
    if options.dry_run:
        shapes = list(TINY_CELLS)
    elif not options.quick:
        known = {shape.name for shape in shapes}
        shapes += [shape for shape in grid() if shape.name not in known]
    for shape in shapes:
        wrong += not measure_cell(bench, shape, recorder, options.peers)
        if options.seconds and time.monotonic() - started > options.seconds:
            print("out of time", flush=True)
            break
    if not options.dry_run:
        wrong += measure_fragments(bench, recorder)
    print(f"{wrong} wrong results, {time.monotonic() - started:.0f} s", flush=True)
    status = recorder.finish()
    return 1 if wrong else status


def grid() -> Iterator[Cell]:
    """All cells: what the goals do not name shows where the design is weak."""
    for rank in RANKS:
        for tokens in (*DECODE_TOKENS, *PREFILL_TOKENS):
            for popularity in POPULARITIES if tokens > 1 else POPULARITIES[:1]:
                if tokens < PREFILL_ROWS or (rank in (16, 64) and popularity != "Zipf"):
                    yield cell(tokens, popularity, rank)


def measure_cell(bench: Bench, shape: Cell, recorder: Recorder, peers: Path | None) -> bool:
    """Two rows; False when the result is wrong."""
    torch.cuda.empty_cache()  # a capture cannot ask for what graphs of earlier cells keep
    layers = bench.layers(shape)
    error = layers.worst_error()
    if not error < ERROR_LIMIT:
        print(f"{shape.name:<44} FAIL: error {error:.2e}", flush=True)
        return False
    floor = shape.floor_bytes(bench.sites) / bench.copy_bytes_a_us
    repeats = bench.repeats if not shape.is_prefill else -(-bench.repeats // 3)
    differences, _ = bench.in_layer(layers, repeats)
    recorder.add(f"{shape.name}: in-layer", differences, "µs", better="lower", floor=floor)
    peer = None
    if peers is not None:
        from benchmarks.ops.peers import best_peer

        peer = best_peer(bench.clock, layers, shape, peers)
    pair = bench.pair(layers, repeats)
    recorder.add(f"{shape.name}: pair", pair, "µs", better="lower", floor=floor, peer=peer)
    return True


def measure_fragments(bench: Bench, recorder: Recorder) -> int:
    """The same 32 rows in one, three and 32 adapters: time of a layer over the first one's. Returns
    the number of wrong results."""
    wrong = 0
    for title, ranks in FRAGMENT_RANKS.items():
        one = 0.0
        for name, rows in FRAGMENTS.items():
            # alone, an adapter has the largest rank of the three: the most bytes
            own = (max(ranks),) if len(rows) == 1 else [ranks[i % 3] for i in range(len(rows))]
            shape = Cell(32, name, title, rows, tuple(own))
            layers = bench.layers(shape)
            error = layers.worst_error()
            if not error < ERROR_LIMIT:
                print(f"32 tokens as {name}, {title}: FAIL: error {error:.2e}", flush=True)
                wrong += 1
                continue
            _, times = bench.in_layer(layers, bench.repeats)
            case = f"32 tokens as {name}, {title}"
            recorder.add(f"{case}: layer", times, "µs", better="lower")
            one = one or median(times)
            if len(rows) > 1:
                tax = [time / one for time in times]
                recorder.add(f"{case}: tax", tax, "×", better="lower")
    return wrong


def compile_all(mode: str) -> None:
    """Fill Triton's cache with many processes; a machine with a GPU has the cores for it."""
    count = max(1, min(12, (os.cpu_count() or 1) - 1))
    command = [sys.executable, "-m", "benchmarks.ops", *([mode] if mode else [])]
    children = [
        subprocess.Popen([*command, "--compile-part", f"{index}/{count}"]) for index in range(count)
    ]
    codes = [child.wait() for child in children]
    if any(codes):
        print(f"compiling ahead failed in {sum(map(bool, codes))} processes", flush=True)


def hardware(device: torch.device) -> str:
    """A folder's name for this device; "" is the harness's name of the processor."""
    if device.type == "cpu":
        return ""
    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.ops", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    found.add_argument("--quick", action="store_true", help="only the cells with goals")
    found.add_argument("--sweep", action="store_true", help="try the tuning candidates")
    found.add_argument("--choose", action="store_true", help="try orders and grids at each site")
    found.add_argument("--seconds", type=float, default=0, help="start nothing new after these")
    found.add_argument("--peers", type=Path, help="folder with other projects' kernels")
    found.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    found.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    found.add_argument("--compile-part", help=argparse.SUPPRESS)
    return found


if __name__ == "__main__":
    sys.exit(main())
