"""The flags of `bench-serve`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.shared.trace import POPULARITIES

#: the last two on an engine that has as many places as seats, which is its default on a GPU
START, EFFICIENCY, MANY, PLACES, PUNICA = PARTS = (
    "start", "efficiency", "many", "places", "punica",
)  # fmt: skip
SEED = 20261129


def read_options(argv: Sequence[str] | None, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=description)
    add = parser.add_argument
    add("--target", default="", help="host:port of an engine, or http://host:port; default: ours")
    add("--base-model", default="", help="what the target calls the model without an adapter")
    add("--workload", choices=("slora", "punica"), default="slora")
    add("--popularity", choices=POPULARITIES, default="zipf", help="of punica")
    add("--trace", type=Path, help="JSONL of your own; instead of --workload")
    add("--write-trace", type=Path, help="keep what was sent, for another server")
    add("--adapters", type=int, default=0, help="default 100, on our own stack 1000")
    add("--adapter-name", default="adapter-{index:04d}", help="names at the target")
    add(
        "--rate",
        type=float,
        default=0.0,
        help="requests a second; default 5, on ours 40 (punica 10)",
    )
    add("--seconds", type=float, default=0.0, help="of arrivals; default 20 (punica on ours 5)")
    add("--cut", type=float, default=0.0, help="end of the measurement; default 60 s after, 40 s")
    add("--context-tokens", type=int, default=2048, help="the target's limit; default 2048")
    add("--vocab-size", type=int, default=32000, help="prompts' token ids are below; default 32000")
    add("--seed", type=int, default=SEED)
    add("--workers", type=int, default=0, help="client processes; default: half the cores")
    add("--shape", choices=("8b", "tiny"), default="8b", help="of our own stack; tiny: a dry run")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="of our own stack")
    add("--only", choices=PARTS, action="append", help="repeatable; default all")
    add("--quick", action="store_true", help="one round; rows go elsewhere")
    add("--engine-arg", action="append", default=[], metavar="'--FLAG VALUE'", help="repeatable")
    add("--clients", type=int, default=4, help="publishing at a time; default 4")
    add("--prepare", type=Path, help="only publish, and keep the registry's database here")
    add("--prepared", type=Path, help="database of --prepare: nothing is published")
    add("--scratch", type=Path, help="folder for blobs and caches; default: /tmp")
    add("--results", type=Path, help="folder for the rows")
    return parser.parse_args(argv)
