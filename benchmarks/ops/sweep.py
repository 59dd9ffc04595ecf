"""Tries the candidates of kernels.lora_tuning on single sites and prints the best of each cell."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TextIO

import torch

from benchmarks.ops.bench import Bench
from benchmarks.ops.clock import Clock
from benchmarks.ops.layers import (
    ERROR_LIMIT,
    Choice,
    Layers,
    base_weights,
    site_buffers,
    splits_of,
)
from benchmarks.ops.shapes import LLAMA_8B, PREFILL_ROWS, SiteShape, build_adapters, cell
from kernels.lora_site_tuning import SOONER, Place
from kernels.lora_tables import PREFILL_TILE_ROWS, TILE_ROWS
from kernels.lora_tuning import (
    DELTA_CANDIDATES,
    MAX_SPLITS,
    PREFILL_DELTA_CANDIDATES,
    PREFILL_SHRINK_CANDIDATES,
    SHRINK_CANDIDATES,
    DeltaTuning,
    ShrinkTuning,
    delta_tuning,
    num_splits,
    shrink_tuning,
)

#: several rows an adapter; latency; bytes; unequal ranks; prefill; all of them
CELLS = (
    (64, "uniform-8", 16), (1, "identical", 16), (64, "distinct", 16), (64, "uniform-8", "mixed"),
    (PREFILL_ROWS * 16, "uniform-8", 16), (256, "Zipf", 16), (64, "identical", 16),
    (8, "distinct", 16), (256, "distinct", 16),
)  # fmt: skip
REPEATS = 9

Candidate = tuple[ShrinkTuning | None, DeltaTuning | None]


def shrinks(site: SiteShape, tile_rows: int) -> list[ShrinkTuning]:
    """Candidates for a site."""
    if tile_rows == PREFILL_TILE_ROWS:
        split_k = shrink_tuning(site.in_features, tile_rows).split_k
        return [replace(each, split_k=split_k) for each in PREFILL_SHRINK_CANDIDATES]
    return [c for c in SHRINK_CANDIDATES if splits_of(site, c, tile_rows) <= MAX_SPLITS]


def deltas(tile_rows: int) -> Sequence[DeltaTuning]:
    return PREFILL_DELTA_CANDIDATES if tile_rows == PREFILL_TILE_ROWS else DELTA_CANDIDATES


def compile_part(clock: Clock, part: str, *, sweep: bool) -> None:
    """Compile every n-th of the kernels that the benchmark launches."""
    index, count = map(int, part.split("/"))
    jobs: list[tuple[int, int, Candidate]] = [
        (site, tokens, (None, None))
        for tokens in (1, PREFILL_ROWS)
        for site in range(len(LLAMA_8B))
    ]
    if sweep:
        jobs += [
            (site, tokens, candidate)
            for tokens, tile_rows in ((1, TILE_ROWS), (PREFILL_ROWS, PREFILL_TILE_ROWS))
            for site in range(len(LLAMA_8B))
            for candidate in to_compile(LLAMA_8B[site], tile_rows)
        ]
    mine = jobs[index::count]
    if not mine:
        return
    weights = base_weights(LLAMA_8B, 1, torch.bfloat16, clock.device)
    for site, tokens, candidate in mine:
        layers = layers_of(clock, weights, (tokens, "identical", 16), site, candidate)
        layers.pair(0, site)
    torch.cuda.synchronize()


def to_compile(site: SiteShape, tile_rows: int) -> Iterator[Candidate]:
    """Pairs that between them need each compiled kernel once: a delta depends on the number of
    partials."""
    chosen = {astuple(replace(each, programs=0)): each for each in shrinks(site, tile_rows)}
    for shrink in chosen.values():
        yield shrink, None
    yield from early_changes(site, tile_rows)
    lengths = {splits_of(site, each, tile_rows): each for each in chosen.values()}
    wanted = {astuple(replace(each, programs=0)): each for each in deltas(tile_rows)}
    for shrink in lengths.values():
        for delta in wanted.values():
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
    sites, tile_rows = layers.adapters.sites, layers.adapters.plan.tile_rows
    assert layers.only_site is not None
    layers.choices[layers.only_site] = Choice(*candidate)
    own = layers.buffers[layers.only_site]
    splits = splits_of(sites[layers.only_site], candidate[0], tile_rows)
    own.u = own.u.new_empty((splits, *own.u.shape[1:]))


def sweep(bench: Bench, seconds: float, results: Path) -> int:
    """For each cell and site: the best shrinks, then with the best of them the best deltas; beside
    the GEMM and after it, and the two kernels alone. All rows go to a file."""
    started, wrong = time.monotonic(), 0
    results.mkdir(parents=True, exist_ok=True)
    with (results / "ops-sweep.jsonl").open("w") as file:
        for which in CELLS:
            for site, shape in enumerate(bench.sites):
                if seconds and time.monotonic() - started > seconds:
                    print("out of time", flush=True)
                    return 1
                trial = Trial(bench, which, site, file)
                tile_rows = trial.layers.adapters.plan.tile_rows
                now = trial.measure((None, None))
                for shrink in shrinks(shape, tile_rows):
                    trial.measure((shrink, None))
                best = trial.best
                for delta in deltas(tile_rows):
                    trial.measure((best[0], delta))
                for candidate in early_changes(shape, tile_rows):
                    trial.measure(candidate)
                if trial.found:
                    trial.report(now)
                wrong += trial.wrong
    print(f"{wrong} wrong results, {time.monotonic() - started:.0f} s", flush=True)
    return 1 if wrong else 0


def early_changes(site: SiteShape, tile_rows: int) -> Iterator[Candidate]:
    """The choice that is in force, with the launches' overlap the other way round."""
    if tile_rows == TILE_ROWS:
        shrink = shrink_tuning(site.in_features, tile_rows)
        partials = num_splits(site.in_features, tile_rows)
        delta = delta_tuning(site.out_features, tile_rows, partials)
        yield replace(shrink, early=not shrink.early), delta
        yield shrink, replace(delta, early=not delta.early)


@dataclass
class Trial:
    """One cell and site, candidate after candidate."""

    bench: Bench
    which: tuple[int, str, int | str]
    site: int
    file: TextIO
    found: list[tuple[float, Candidate]] = field(default_factory=list)
    wrong: int = 0

    def __post_init__(self) -> None:
        num_layers = 2 if self.which[0] >= PREFILL_ROWS else len(self.bench.weights)
        weights = self.bench.weights[:num_layers]
        self.layers = layers_of(self.bench.clock, weights, self.which, self.site, (None, None))
        self.repeats = REPEATS if num_layers > 2 else 5

    @property
    def best(self) -> Candidate:
        return min(self.found, key=lambda each: each[0])[1]

    def measure(self, candidate: Candidate) -> float:
        choose(self.layers, candidate)
        error = self.layers.worst_error()
        if not error < ERROR_LIMIT:
            print(f"WRONG, error {error:.2e}: {self.which} {describe(candidate)}", flush=True)
            self.wrong += 1
            return float("inf")
        value = median(self.bench.in_layer(self.layers, self.repeats)[0])
        self.row("in-layer", value, candidate, error)
        self.found.append((value, candidate))
        return value

    def row(self, kind: str, value: float, candidate: Candidate, error: float) -> None:
        row = {
            "cell": self.which,
            "site": self.layers.adapters.sites[self.site].name,
            "kind": kind,
            "us": round(value, 2),
            "error": error,
            "tuning": describe(candidate),
        }
        self.file.write(json.dumps(row) + "\n")

    def report(self, now: float) -> None:
        name = self.layers.adapters.sites[self.site].name
        value, best = min(self.found, key=lambda each: each[0])
        choose(self.layers, best)
        self.layers.choices[self.site] = Choice(*best, Place("after", SOONER))
        after = median(self.bench.in_layer(self.layers, self.repeats)[0])
        shrink = median(self.bench.pair(self.layers, self.repeats, expands=False))
        delta = median(self.bench.pair(self.layers, self.repeats, shrinks=False))
        for kind, other in (("after the GEMM", after), ("shrink", shrink), ("delta", delta)):
            self.row(kind, other, best, 0.0)
        print(
            f"{self.which} {name}: in force {now:.1f}, best {value:.1f} (after the GEMM"
            f" {after:.1f}; shrink alone {shrink:.1f}, delta alone {delta:.1f} µs)\n"
            f"   {describe(best)}",
            flush=True,
        )


def describe(candidate: Candidate) -> str:
    shrink, delta = candidate
    texts = [
        name + " " + " ".join(f"{k}={v}" for k, v in asdict(tuning).items())
        for name, tuning in (("shrink", shrink), ("delta", delta))
        if tuning
    ]
    return "; ".join(texts) or "in force"
