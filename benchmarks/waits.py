"""`make bench-waits`: how long requests wait and pause under a served load, by how turns end.

The load of `make bench-serve` (Poisson arrivals, popularity 1 / rank, 8 to 512 tokens in and out)
on the real core; model, copies and clock are simulated (benchmarks/fairness/turns.py), with what a
step cost on one H200 (benchmarks/results/nvidia-h200/step.jsonl). Each row is one way to end turns;
the engine's own defaults come first. A number of pages that holds few sequences shows what pauses
cost where pages are short: *again* counts tokens that were computed once more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.fairness import turns
from benchmarks.fairness.policy import Job, Shape
from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder, quantile
from benchmarks.shared.trace import slora
from engine_svc.settings import EngineSettings
from engine_svc.types import EngineLimits, RequestEnded, SequenceOutput

SEED = 20261129
DEFAULTS = EngineSettings(model="any")
#: (sequences, ms of a step of the base), and for each adapter; 8B shape in bf16 on an H200
BASE_MS = ((1, 4.62), (8, 4.80), (64, 6.17), (128, 7.86), (256, 11.68))
ADAPTER_MS, PROMPT_TOKEN_MS = 0.0225, 0.025
#: stands for the service of a usual request on each seat of a place
USUAL = -1
#: ways to end a turn: what differs from the defaults
WAYS: Mapping[str, Mapping[str, Any]] = {
    "as by default": {},
    "turns of up to 512 steps": {"turn_steps": 512, "closing_steps": 64},
    "a large quantum": {"quantum": USUAL},
    "at most 64 steps": {"turn_max_steps": 64},
    "places kept while needed": {"policy": "resident-first"},
}
FIRST, LONG = tuple(WAYS)[:2]


@dataclass(frozen=True, slots=True)
class Load:
    rate: float
    seconds: float
    adapters: int
    places: int
    seats: int
    step_tokens: int
    pages: int


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds and ms of one load; `again`: tokens computed once more, of prompts or generated."""

    finished_per_s: float
    ttft_s: Sequence[float]
    tpot_ms: Sequence[float]
    whole_s: Sequence[float]
    again: int


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    load = Load(
        options.rate, options.seconds, options.adapters, options.max_loras, options.max_num_seqs,
        options.max_num_batched_tokens, options.pages,
    )  # fmt: skip
    recorder = Recorder("waits", results=RESULTS if load == _default_load() else PARTIAL)
    print(f"{'':<28}{'done/s':>8}{'TTFT s p50':>12}{'p99':>8}{'TPOT ms p50':>13}{'p99':>7}"
          f"{'whole s mean':>14}{'p99':>7}{'again':>9}")  # fmt: skip
    found = {name: run(load, way) for name, way in WAYS.items()}
    for name, one in found.items():
        print(
            f"{name:<28}{one.finished_per_s:>8.1f}{quantile(one.ttft_s, 0.5):>12.2f}"
            f"{quantile(one.ttft_s, 0.99):>8.2f}{quantile(one.tpot_ms, 0.5):>13.1f}"
            f"{quantile(one.tpot_ms, 0.99):>7.0f}{sum(one.whole_s) / len(one.whole_s):>14.2f}"
            f"{quantile(one.whole_s, 0.99):>7.1f}{one.again:>9}"
        )
    ours, long = found[FIRST], found[LONG]
    for case, ratio, better in (
        ("TTFT p99, by default / long turns",
         quantile(ours.ttft_s, 0.99) / quantile(long.ttft_s, 0.99), "lower"),
        ("finished, by default / long turns", ours.finished_per_s / long.finished_per_s, "higher"),
    ):  # fmt: skip
        recorder.add(case, [ratio], "×", better=better)
    return recorder.finish()


def limits_of(load: Load, way: Mapping[str, Any]) -> EngineLimits:
    shape = Shape(load.places, load.seats, load.step_tokens)
    limits = replace(
        turns.limits_of(shape, quantum=0, turn_max_steps=DEFAULTS.turn_max_steps),
        num_pages=load.pages,
        context_tokens=2048,
        turn_steps=DEFAULTS.turn_steps,
        closing_steps=DEFAULTS.closing_steps,
    )
    way = dict(way)
    if way.get("quantum") == USUAL:
        way["quantum"] = -(-load.seats // load.places) * (256 + 2 * 256)
    return replace(limits, **way)


def run(load: Load, way: Mapping[str, Any]) -> Found:
    """One load to its end. Raises: RuntimeError: a request failed."""
    policy = turns.Turns(limits_of(load, way), cost=step_s)
    names = [str(index) for index in range(load.adapters)]
    requests = slora(names, load.rate, load.seconds, SEED)
    jobs = [
        Job(n, int(r.adapter), r.prompt_tokens, r.output_tokens) for n, r in enumerate(requests)
    ]
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    sent = 0
    while len(ended) < len(jobs):
        while sent < len(jobs) and requests[sent].time <= policy.clock.now():
            policy.submit(jobs[sent])
            sent += 1
        report = policy.core.step()
        if report.step < 0:
            policy.clock.now_s += turns.IDLE_S
        now = policy.clock.now()
        for item in policy.core.take_outputs():
            if isinstance(item, SequenceOutput):
                first.setdefault(int(item.request_id), now)
            elif isinstance(item, RequestEnded):
                if item.failure is not None:
                    raise RuntimeError(f"request {item.request_id}: {item.failure.message}")
                ended[int(item.request_id)] = now
                policy.runner.forget(int(item.request_id))
    return Found(
        len(jobs) / max(ended.values()),
        sorted(first[n] - requests[n].time for n in first),
        sorted(1e3 * (ended[n] - first[n]) / max(1, jobs[n].output - 1) for n in ended),
        sorted(ended[n] - requests[n].time for n in ended),
        policy.runner.num_again,
    )


def step_s(batch: int, adapters: int, prompt_tokens: int) -> float:
    """Seconds of a step with so many sequences, distinct adapters and prompt tokens."""
    (low, below), *others = BASE_MS
    for high, above in others:
        if batch <= high or (high, above) == BASE_MS[-1]:
            break
        low, below = high, above
    base = below + max(0, batch - low) / (high - low) * (above - below)
    return (base + ADAPTER_MS * adapters + PROMPT_TOKEN_MS * prompt_tokens) / 1e3


def _default_load() -> Load:
    return Load(40.0, 20.0, 1000, 32, 256, 1024, turns.ARENA_PAGES - 10_000)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    load = _default_load()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.waits", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--rate", type=float, default=load.rate, help="requests a second")
    add("--seconds", type=float, default=load.seconds, help="of arrivals")
    add("--adapters", type=int, default=load.adapters)
    add("--max-loras", type=int, default=load.places)
    add("--max-num-seqs", type=int, default=load.seats)
    add("--max-num-batched-tokens", type=int, default=load.step_tokens)
    add("--pages", type=int, default=load.pages, help="of 16 positions; an adapter takes 40")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
