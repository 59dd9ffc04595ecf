"""Chooses how each site is computed: tries all of `choices` at single sites on the cells with
goals, then measures whole layers with the best choice of every site.

A choice may depend on a site and on the rows of a step, since both are fixed in a captured graph;
so two sets are measured: one for all rows, one by rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from benchmarks.ops.bench import Bench
from benchmarks.ops.choices import CHOICES
from benchmarks.ops.layers import ERROR_LIMIT, Choice, Layers
from benchmarks.ops.shapes import Cell, cell

#: (cell, µs of a whole layer that it may cost): goals of ops, what a goal of step leaves for it, or
#: a tenth more than its bytes and a few µs. Each number of rows has cells of few bytes and of many:
#: a place chosen by few alone made 32 adapters of one row each three times as dear as their bytes
GOALS: tuple[tuple[Cell, float], ...] = (
    (cell(1, "identical", 16), 3),
    (cell(1, "identical", 64), 6),
    (cell(8, "distinct", 16), 10),
    (cell(8, "distinct", "mixed"), 15),
    (cell(8, "distinct", 64), 27),
    (cell(16, "distinct", 16), 15),
    (Cell(32, "20+8+4", "8/16/64", (20, 8, 4), (8, 16, 64)), 15),
    (cell(32, "uniform-8", "mixed"), 16),
    (cell(32, "distinct", 16), 27),
    (Cell(32, "distinct", "8/16/64", (1,) * 32, ((8, 16, 64) * 11)[:32]), 45),
    (cell(64, "identical", 16), 10),
    (cell(64, "uniform-8", 16), 12),
    (cell(64, "uniform-8", "mixed"), 20),
    (Cell(64, "two rows each", "16", (2,) * 32, (16,) * 32), 40),
    (Cell(64, "two rows each", "8/16/64", (2,) * 32, ((8, 16, 64) * 11)[:32]), 48),
    (cell(64, "distinct", 16), 49),
    (cell(64, "distinct", "mixed"), 96),
    (Cell(128, "four rows each", "16", (4,) * 32, (16,) * 32), 55),
    (Cell(128, "two rows each", "16", (2,) * 64, (16,) * 64), 75),
    (cell(128, "uniform-8", "mixed"), 25),
    (cell(128, "distinct", 16), 98),
    (cell(128, "distinct", "mixed"), 180),
    (cell(128, "Zipf", 64), 80),
    (cell(256, "Zipf", 16), 46),
    (Cell(256, "four rows each", "16", (4,) * 64, (16,) * 64), 100),
    (cell(256, "uniform-8", "mixed"), 35),
    (cell(256, "identical", 64), 45),
    (cell(256, "distinct", 16), 188),
    (cell(256, "distinct", "mixed"), 350),
    (Cell(512, "64 rows each", "16", (64,) * 8, (16,) * 8), 60),
    (Cell(512, "two prompts", "16", (256, 256), (16, 16)), 60),
    (Cell(512, "one prompt", "32", (512,), (32,)), 70),
    (Cell(512, "one prompt", "64", (512,), (64,)), 110),
    (Cell(512, "decodes, prompt", "8/16/64", (1,) * 32 + (480,), (8, 16, 64) * 11), 110),
    (Cell(1024, "64 rows each", "16", (64,) * 16, (16,) * 16), 100),
    (Cell(1024, "two prompts", "16", (512, 512), (16, 16)), 100),
    (Cell(1024, "two prompts", "32", (512, 512), (32, 32)), 130),
    (Cell(1024, "decodes, prompt", "8/16/64", (1,) * 65 + (959,), (8, 16, 64) * 22), 140),
)
REPEATS = 9
SHOWN = 4

#: (cell's name, site, choice's name) → µs in-layer
Times = dict[tuple[str, int, str], float]


@dataclass
class Chooser:
    bench: Bench
    choices: dict[str, Choice]
    times: Times = field(default_factory=dict)
    rows: list[dict[str, object]] = field(default_factory=list)
    wrong: int = 0

    def sites(self, shape: Cell, is_over: Callable[[], bool]) -> None:
        """Each site alone with each choice."""
        layers = self.bench.layers(shape)
        for site, each in enumerate(self.bench.sites):
            layers.only_site = site
            torch.cuda.empty_cache()  # a capture cannot ask for what earlier ones keep
            for name, choice in self.choices.items():
                if is_over():
                    return
                layers.choices[site] = choice
                value = self.measure(layers, shape, each.name, name)
                if value is not None:
                    self.times[shape.name, site, name] = value
            self.show(shape, site)

    def whole(self, shape: Cell, title: str, names: list[str]) -> float | None:
        """All sites of a layer, each with the choice of that name."""
        layers = self.bench.layers(shape)
        layers.choices = [self.choices[name] for name in names]
        return self.measure(layers, shape, "layer", title)

    def measure(self, layers: Layers, shape: Cell, where: str, name: str) -> float | None:
        """None: it is wrong or cannot run."""
        try:
            error = layers.worst_error()
            if not error < ERROR_LIMIT:
                raise ValueError(f"error {error:.2e}")
            differences, times = self.bench.in_layer(layers, REPEATS)
        except (RuntimeError, ValueError) as failure:
            print(f"WRONG: {shape.name}, {where}, {name}: {failure}", flush=True)
            self.wrong += 1
            return None
        value = median(differences)
        row = {"cell": shape.name, "site": where, "choice": name, "us": round(value, 2)}
        self.rows.append({**row, "with_us": round(median(times), 2), "error": error})
        return value

    def show(self, shape: Cell, site: int) -> None:
        mine = {n: t for (c, s, n), t in self.times.items() if (c, s) == (shape.name, site)}
        best = sorted(mine, key=mine.__getitem__)[:SHOWN]
        now = mine.get("in force", float("nan"))
        text = "; ".join(f"{name} {mine[name]:.1f}" for name in best)
        print(f"{shape.name} {self.bench.sites[site].name}: {now:.1f} → {text}", flush=True)

    def best(self, goals: Iterable[tuple[Cell, float]]) -> list[str]:
        """For each site the choice with the least sum of times over goals."""
        goals = list(goals)
        found = []
        for site in range(len(self.bench.sites)):
            sums = {
                name: sum(
                    self.times.get((shape.name, site, name), float("inf")) / goal
                    for shape, goal in goals
                )
                for name in self.choices
            }
            found.append(min(sums, key=sums.__getitem__))
        return found


def choose(
    bench: Bench,
    seconds: float,
    results: Path,
    goals: tuple[tuple[Cell, float], ...] = GOALS,
    choices: dict[str, Choice] = CHOICES,
) -> int:
    """Returns 0 when everything is right."""
    started = time.monotonic()
    chooser = Chooser(bench, choices)
    measured = []
    for shape, goal in goals:
        chooser.sites(shape, lambda: bool(seconds) and time.monotonic() - started > seconds)
        if all((shape.name, site, "in force") in chooser.times for site in range(len(bench.sites))):
            measured.append((shape, goal))
    everywhere = chooser.best(measured)
    print(f"for all rows: {' | '.join(everywhere)}", flush=True)
    by_rows: dict[int, list[str]] = {}
    for tokens in sorted({shape.tokens for shape, _ in measured}):
        by_rows[tokens] = chooser.best(each for each in measured if each[0].tokens == tokens)
        print(f"{tokens} rows: {' | '.join(by_rows[tokens])}", flush=True)
    for shape, _ in measured:
        sets = {
            "in force": ["in force"] * len(bench.sites),
            "for all rows": everywhere,
            "by rows": by_rows.get(shape.tokens, everywhere),
        }
        found = {title: chooser.whole(shape, title, names) for title, names in sets.items()}
        text = ", ".join(f"{title} {value or 0:.1f}" for title, value in found.items())
        print(f"{shape.name}, layer: {text} µs", flush=True)
    results.mkdir(parents=True, exist_ok=True)
    with (results / "ops-choose.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in chooser.rows)
    print(f"{chooser.wrong} wrong results, {time.monotonic() - started:.0f} s", flush=True)
    return 1 if chooser.wrong else 0
