"""Where a decode step's time goes: kernels, launches and gaps of replayed steps, by torch.profiler.

    python -m benchmarks.step_profile [--case 64:8 …] [--shape tiny --device cpu --static-buffers]

For each case (batch:adapters of rank 16): the step without the profiler, the host's share of it by
verb, then each kernel's launches and µs a step. *busy* counts time in which some kernel runs,
*idle* the rest between a step's first and last one. Records nothing.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.shared.made_models import SHAPES
from benchmarks.step.bench import Bench, open_bench
from benchmarks.step.cases import FULL, RANK_16, TINY, Case, even
from engine_svc.model.gpu import site_deltas
from engine_svc.types import NO_SLOT

DEFAULT_CASES = ("1:0", "1:1", "8:0", "8:8", "64:0", "64:1", "64:8", "256:0", "256:8")
TINY_CASES = ("1:0", "4:2")
#: steps that the profiler sees; those without it
SEEN, TIMED = 4, 48
#: steps of a mix
MIXED = 8
SHOWN = 16
VERBS = ("forward", "sample", "collect")


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy on the device, µs."""

    name: str
    begin: float
    end: float


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    size = FULL if options.shape == "8b" else TINY
    default = DEFAULT_CASES if options.shape == "8b" else TINY_CASES
    cases = options.case or (() if options.mix else default)
    wanted = [_asked(case) for case in cases]
    mixes = [[*map(int, mix.split(":"))] for mix in options.mix or ()]
    adapters = max([len(case.groups) for case in wanted] + [mix[2] for mix in mixes])
    ranks = {RANK_16: size.ranks[RANK_16][: adapters or 1]}
    num_seqs = max([case.batch for case in wanted] + [mix[0] + mix[1] for mix in mixes])
    with tempfile.TemporaryDirectory(prefix="lpx-profile-") as scratch:
        bench = open_bench(
            Path(scratch), options, size, size.max_loras[1], ranks, num_seqs, options.arena_gib
        )
        print(f"model to a ready runner: {bench.load_s:.2f} s", flush=True)
        for case in wanted:
            _case(bench, case)
        for mix in mixes:
            _mix(bench, *mix)
        bench.close()
    return 0


def _asked(text: str) -> Case:
    batch, adapters = map(int, text.split(":"))
    return even(batch, adapters)


def _case(bench: Bench, case: Case) -> None:
    slots = case.slots(bench.slots[case.ranks])
    bench.driver.decode(slots, 8)
    allocated = _allocations(bench)
    host: dict[str, list[float]] = {verb: [] for verb in VERBS}
    driver: Any = bench.driver
    driver._runner = _Timed(bench.model.runner, host)
    decoded = bench.driver.decode(slots, TIMED)
    driver._runner = bench.model.runner
    step = statistics.median(decoded.compute_s) * 1e6
    verbs = ", ".join(f"{verb} {statistics.median(host[verb][2:]) * 1e6:.0f}" for verb in VERBS)
    print(f"\n{case.title}: {decoded.tpot_s * 1e6:.0f} µs a token, {step:.0f} on the device")
    print(f"  host, µs a call: {verbs} (waits included)")
    if bench.model.device == "cuda":
        print(f"  device allocations: {allocated} before, {_allocations(bench) - allocated} here")
        _show(_spans(lambda: bench.driver.decode(slots, SEEN)))


def _mix(bench: Bench, decodes: int, prompts: int, adapters: int) -> None:
    """A step with prompts, with short and with long work items of adapters where it may choose."""
    slots = [NO_SLOT] * (decodes + prompts)
    runner: Any = bench.model.runner
    driver: Any = bench.driver
    standing = site_deltas.LONG_START, site_deltas.LONG_ITEM
    if adapters:
        # prompts and tokens have adapters in turn
        slots = [bench.slots[RANK_16][seat % adapters] for seat in range(decodes + prompts)]
    for name, start in (("short", 1 << 20), ("long", 0)) if adapters else (("none", 0),):
        site_deltas.LONG_START, site_deltas.LONG_ITEM = start, 0
        host: dict[str, list[float]] = {verb: [] for verb in VERBS}
        driver._runner = _Timed(runner, host)
        seconds = driver.mixed(slots, prompts, MIXED)
        driver._runner = runner
        forward = statistics.median(host["forward"][2:]) * 1e6
        print(
            f"{decodes} tokens + {prompts} prompts, {adapters} adapters, work items {name}: "
            f"{statistics.median(seconds) * 1e6:.0f} µs on the device, forward {forward:.0f} µs",
            flush=True,
        )
    site_deltas.LONG_START, site_deltas.LONG_ITEM = standing


class _Timed:
    """A runner whose verbs' host seconds are kept."""

    def __init__(self, runner: Any, seconds: dict[str, list[float]]) -> None:
        self._runner, self._seconds = runner, seconds

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._runner, name)
        if name not in VERBS:
            return found

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = found(*arguments)
            self._seconds[name].append(time.perf_counter() - began)
            return result

        return timed


def _allocations(bench: Bench) -> int:
    return int(getattr(bench.model.runner, "num_serving_allocations", 0))


def _spans(run: Callable[[], object]) -> list[Span]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = []
    for event in profiler.events() or ():
        if str(event.device_type).endswith("CUDA"):
            found.append(Span(event.name, event.time_range.start, event.time_range.end))
    return sorted(found, key=lambda span: span.begin)


def _show(spans: Sequence[Span]) -> None:
    by_name: dict[str, list[float]] = {}
    for span in spans:
        by_name.setdefault(_short(span.name), []).append(span.end - span.begin)
    steps, total = SEEN, sum(map(sum, by_name.values()))
    busy, idle, gaps = _busy(spans)
    print(
        f"  {len(spans) / steps:.0f} launches a step, {total / steps:.0f} µs in all; "
        f"busy {busy / steps:.0f} µs, idle {idle / steps:.0f} µs in {gaps / steps:.0f} gaps"
    )
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN]:
        print(
            f"  {sum(times) / steps:9.1f} µs  {len(times) / steps:6.1f} ×"
            f" {statistics.median(times):8.2f} µs  {name}"
        )


def _busy(spans: Sequence[Span]) -> tuple[float, float, int]:
    """(µs with a kernel, µs without one, how many gaps below 1 ms)."""
    busy = idle = 0.0
    gaps = 0
    end = spans[0].begin if spans else 0.0
    for span in spans:
        gap = span.begin - end
        if 0 < gap < 1000:
            idle += gap
            gaps += 1
        busy += max(0.0, span.end - max(span.begin, end))
        end = max(end, span.end)
    return busy, idle, gaps


def _short(name: str) -> str:
    """A kernel's name without its template arguments and parameters."""
    plain = re.sub(r"<.*", "", name.split("(")[0]).removeprefix("void ")
    return (plain or name)[:88]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", action="append", help="batch:adapters, repeatable")
    parser.add_argument("--mix", action="append", help="tokens:prompts:adapters, repeatable")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b", help="tiny: a dry run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--static-buffers", action="store_true")
    parser.add_argument("--arena-gib", type=float, default=48.0)
    parser.add_argument("--context-tokens", type=int, default=2048)
    options = parser.parse_args(argv)
    options.prefill = False
    return options


if __name__ == "__main__":
    sys.exit(main())
