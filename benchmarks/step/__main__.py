"""`make bench-step`: whole steps of the model, with and without adapters.

    tpot          decode, batches × adapters, behind prompts that are computed already
    fragments     the same tokens on one, on three and on as many adapters
    prefill       prompts with adapters against prompts without
    core          the same load as requests: planning, admission, commit
    places        one adapter, few places against many
    shards        a checkpoint from the page cache to the device (16 GB of scratch)

Weights and adapters are random. Steps are driven through the Runner with hand-made plans, one
ahead; adapters are copied by the slot writer. Floor: bytes that a step must read over the bandwidth
of a copy in the same run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder, cpu_name
from benchmarks.shared.made_models import SHAPES
from benchmarks.step.bench import open_bench
from benchmarks.step.cases import FULL, RANK_16, TINY, Size
from benchmarks.step.floor import device_name, release
from benchmarks.step.measures import (
    measure_core,
    measure_fragments,
    measure_places,
    measure_prefill,
    measure_tpot,
    record_places,
)
from benchmarks.step.shards import measure_shards

TPOT, FRAGMENTS, PREFILL, CORE, PLACES = STEPS = ("tpot", "fragments", "prefill", "core", "places")
SHARDS = "shards"
PARTS = (*STEPS, SHARDS)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    size = FULL if options.shape == "8b" else TINY
    rounds = 1 if options.quick else size.rounds
    is_partial = options.quick or {*options.only} != {*PARTS} or options.shape != "8b"
    name = device_name(options.device, cpu_name())
    results = options.results or (PARTIAL if is_partial else RESULTS)
    # goals are of the 8B shape
    recorder = Recorder("step" if options.shape == "8b" else "step-tiny", name, results)
    with tempfile.TemporaryDirectory(prefix="lpx-bench-", dir=options.scratch) as scratch:
        folder = Path(scratch)
        if SHARDS in options.only:
            measure_shards(recorder, folder, SHAPES[options.shape], options.device, rounds)
        failures: list[str] = []
        many: list[float] = []
        if {*STEPS} & {*options.only}:
            failures, many = _many_places(recorder, folder, options, size, rounds)
            _free(options.device)
        if PLACES in options.only and many:
            more, few = _few_places(recorder, folder, options, size, rounds)
            record_places(recorder, size, few, many)
            failures += more
    for failure in failures:
        print(f"FAIL {failure}", flush=True)
    return max(recorder.finish(), int(bool(failures)))


def _many_places(
    recorder: Recorder, scratch: Path, options: argparse.Namespace, size: Size, rounds: int
) -> tuple[list[str], list[float]]:
    """All parts on one engine with all adapters. Returns: failures, TPOT for `places`."""
    bench = open_bench(
        scratch, options, size, size.max_loras[1], size.ranks, size.max_num_seqs, options.arena_gib
    )
    recorder.add("model to a ready runner", [bench.load_s], "s", better="lower")
    rate = bench.copy_bytes_per_s / 1e9
    recorder.add("adapters, host to slots", [rate], "GB/s", better="higher")
    recorder.add("copy bandwidth", [bench.floor.bytes_per_s / 1e9], "GB/s", better="higher")
    with_peer = options.shape == "8b" and "h200" in device_name(options.device, "")
    many: list[float] = []
    parts: dict[str, Callable[[], None]] = {
        PLACES: lambda: many.extend(measure_places(bench, rounds)),
        TPOT: lambda: measure_tpot(recorder, bench, rounds, with_peer),
        FRAGMENTS: lambda: measure_fragments(recorder, bench, rounds),
        PREFILL: lambda: measure_prefill(recorder, bench, rounds, with_peer),
        CORE: lambda: measure_core(recorder, bench, rounds),
    }
    for name, measure in parts.items():
        if name in options.only:
            try:
                measure()
            except Exception:
                # the other parts are still worth their time on a GPU
                traceback.print_exc()
                bench.failures.append(f"{name} broke off")
    bench.close()
    return bench.failures, many


def _few_places(
    recorder: Recorder, scratch: Path, options: argparse.Namespace, size: Size, rounds: int
) -> tuple[list[str], list[float]]:
    one = {RANK_16: size.ranks[RANK_16][:1]}
    # a small arena: the memory of the first engine may not be back yet
    bench = open_bench(
        scratch, options, size, size.max_loras[0], one, size.places.batch, options.arena_gib / 3
    )
    recorder.add("model to a ready runner, again", [bench.load_s], "s", better="lower")
    few = measure_places(bench, rounds)
    bench.close()
    return bench.failures, few


def _free(device: str) -> None:
    """A model is a ring of objects: only the collector gives its memory back."""
    gc.collect()
    release(device)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="one round; rows go elsewhere")
    parser.add_argument(
        "--only",
        choices=PARTS,
        action="append",
        help="repeatable; default all, but shards not with --quick",
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b", help="tiny: a dry run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--static-buffers", action="store_true", help="on a CPU: the GPU's way through a step"
    )
    parser.add_argument("--prefill", action="store_true", help="compute every prompt, copy none")
    parser.add_argument("--arena-gib", type=float, default=48.0, help="default 48")
    parser.add_argument("--context-tokens", type=int, default=2048, help="default 2048")
    parser.add_argument("--results", type=Path, help="folder for the rows")
    parser.add_argument("--scratch", type=Path, help="folder for the shards; default: /tmp")
    options = parser.parse_args(argv)
    options.only = tuple(options.only or (STEPS if options.quick else PARTS))
    return options


if __name__ == "__main__":
    sys.exit(main())
