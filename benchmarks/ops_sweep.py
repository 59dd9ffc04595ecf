"""Tries the candidates of kernels.lora_tuning on single sites and prints the best of each cell."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from benchmarks.ops_clock import Clock
from benchmarks.ops_layers import ERROR_LIMIT, Layers, base_weights, site_buffers, splits_of
from benchmarks.ops_shapes import LLAMA_8B, PREFILL_ROWS, SiteShape, build_adapters, cell
from kernels.lora_tuning import (
    DELTA_CANDIDATES,
    SHRINK_CANDIDATES,
    DeltaTuning,
    ShrinkTuning,
)

if TYPE_CHECKING:
    from benchmarks.ops import Bench

#: latency, several rows an adapter, one row each, unequal ranks
CELLS = ((1, "identical", 16), (64, "uniform-8", 16), (64, "distinct", 16), (64, "Zipf", "mixed"))
REPEATS = 9
#: partials that a delta may be asked to add
MOST_SPLITS = 16

Candidate = tuple[ShrinkTuning | None, DeltaTuning | None]


def candidates(site: SiteShape) -> Iterator[Candidate]:
    """The choice that is in force, then one side changed at a time."""
    yield None, None
    for shrink in SHRINK_CANDIDATES:
        if splits_of(site, shrink, 16) <= MOST_SPLITS:
            yield shrink, None
    for delta in DELTA_CANDIDATES:
        yield None, delta


def compile_part(clock: Clock, part: str, *, sweep: bool) -> None:
    """Compile every n-th of the kernels that the benchmark launches."""
    index, count = map(int, part.split("/"))
    jobs: list[tuple[int, int, Candidate]] = [
        (site, tokens, (None, None))
        for tokens in (1, PREFILL_ROWS)
        for site in range(len(LLAMA_8B))
    ]
    if sweep:
        jobs = [
            (site, 1, candidate)
            for site in range(len(LLAMA_8B))
            for candidate in distinct(LLAMA_8B[site])
        ]
    mine = jobs[index::count]
    if not mine:
        return
    weights = base_weights(LLAMA_8B, 1, torch.bfloat16, clock.device)
    for site, tokens, candidate in mine:
        layers = layers_of(clock, weights, (tokens, "identical", 16), site, candidate)
        layers.pair(0, site)
    torch.cuda.synchronize()


def distinct(site: SiteShape) -> Iterator[Candidate]:
    """Candidates that need a compiled kernel of their own."""
    seen = set()
    for shrink, delta in candidates(site):
        key = (
            (shrink.split_k, shrink.block_k, shrink.num_warps) if shrink else None,
            (delta.block_columns, delta.dot_columns, delta.num_warps) if delta else None,
        )
        if key not in seen:
            seen.add(key)
            yield shrink, delta


def layers_of(
    clock: Clock,
    weights: list[list[torch.Tensor]],
    which: tuple[int, str, int | str],
    site: int,
    candidate: Candidate,
) -> Layers:
    """One cell, one site, one candidate."""
    shape, first = cell(*which), weights[0][0]
    adapters = build_adapters(
        shape, LLAMA_8B, len(weights), max(8, len(shape.rows)), first.dtype, first.device
    )
    buffers = site_buffers(LLAMA_8B, shape.tokens, 64, adapters.plan.tile_rows, first)
    layers = Layers(clock, weights, adapters, buffers, only_site=site)
    choose(layers, candidate)
    return layers


def choose(layers: Layers, candidate: Candidate) -> None:
    """Take a candidate: its number of partials decides the shape of u."""
    layers.shrink_tuning, layers.delta_tuning = candidate
    sites, tile_rows = layers.adapters.sites, layers.adapters.plan.tile_rows
    assert layers.only_site is not None
    own = layers.buffers[layers.only_site]
    splits = splits_of(sites[layers.only_site], candidate[0], tile_rows)
    own.u = own.u.new_empty((splits, *own.u.shape[1:]))


def sweep(bench: Bench, seconds: float, results: Path) -> int:
    """Print the three best and the present choice of each cell and site; all rows go to a file."""
    started, wrong = time.monotonic(), 0
    results.mkdir(parents=True, exist_ok=True)
    with (results / "ops-sweep.jsonl").open("w") as file:
        for which in CELLS:
            for site, shape in enumerate(bench.sites):
                if seconds and time.monotonic() - started > seconds:
                    print("out of time", flush=True)
                    return 1
                found: list[tuple[float, str]] = []
                layers = layers_of(bench.clock, bench.weights, which, site, (None, None))
                for candidate in candidates(shape):
                    choose(layers, candidate)
                    error = layers.worst_error()
                    wrong += not error < ERROR_LIMIT
                    value = median(bench.in_layer(layers, REPEATS)[0])
                    row = {"cell": which, "site": shape.name, "in_layer_us": value, "error": error}
                    row |= {"tuning": describe(candidate)}
                    file.write(json.dumps(row) + "\n")
                    found.append((value, describe(candidate)))
                report(which, shape, found)
    print(f"{wrong} wrong results, {time.monotonic() - started:.0f} s", flush=True)
    return 1 if wrong else 0


def describe(candidate: Candidate) -> str:
    shrink, delta = candidate
    if shrink:
        return "shrink " + " ".join(f"{k}={v}" for k, v in asdict(shrink).items())
    if delta:
        return "delta " + " ".join(f"{k}={v}" for k, v in asdict(delta).items())
    return "in force"


def report(
    which: tuple[int, str, int | str], site: SiteShape, found: list[tuple[float, str]]
) -> None:
    now = found[0][0]
    print(f"{which} {site.name}: in force {now:.1f} µs", flush=True)
    for kind in ("shrink", "delta"):
        best = sorted(each for each in found if each[1].startswith(kind))[:2]
        for value, text in best:
            print(f"   {value:6.1f}  {text}", flush=True)
