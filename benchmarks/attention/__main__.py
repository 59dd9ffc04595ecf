"""`make bench-attention`: decode and prefill attention over pages, one layer, 8B shape, on a GPU.

    python -m benchmarks.attention [--quick] [--sweep --seconds 120 --out FILE]

Each time is a replay of a CUDA graph over layers whose keys and values differ, divided by their
number. Every output is compared with the fp32 reference first; a wrong one prints FAIL and no time.
--sweep tries the tuning's candidates and records nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.attention import sweep
from benchmarks.attention.cases import (
    SHAPE_8B,
    TOLERANCE,
    Batch,
    Case,
    Shape,
    decode_case,
    make_batch,
    make_pages,
    prefill_case,
    ragged_case,
)
from benchmarks.attention.peers import copied_layers, peers
from benchmarks.attention.replays import measure
from benchmarks.shared.bandwidth import copy_bytes_per_s
from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder
from kernels.decode_attention import decode_attention, decode_scratch
from kernels.decode_attention_triton import decode_attention_triton
from kernels.prefill_attention import prefill_attention, tile_rows

DECODES = (
    decode_case(1, 640),
    decode_case(8, 640),
    decode_case(64, 640),
    decode_case(128, 640),
    decode_case(256, 640),
    ragged_case(256, 16, 1264),
    decode_case(1, 16384),
    decode_case(8, 16384),
)
PREFILLS = (
    prefill_case(1, 0, 8192),
    prefill_case(16, 0, 512),
    prefill_case(4, 6144, 2048),
    prefill_case(64, 1000, 17),
)
#: the sizes of decode launches between them, and long contexts
NEAR = (
    *(decode_case(rows, 640) for rows in (1, 2, 4, 8, 16, 32, 64, 96)),
    *(decode_case(rows, 16384) for rows in (1, 8)),
)
#: runs anywhere in a second: a dry run of this script
TINY_SHAPE = Shape(6, 2, 64, 2)
TINY = (decode_case(3, 40), ragged_case(4, 3, 60), prefill_case(2, 20, 9), prefill_case(1, 0, 30))


@dataclass
class Bench:
    device: torch.device
    shape: Shape
    pages: torch.Tensor
    copy_rate: float
    replays: int
    recorder: Recorder
    failures: list[str] = field(default_factory=list)

    def run(self, case: Case) -> None:
        batch = make_batch(case, self.shape, self.pages)
        decodes = case.rows == len(case.chunks)
        one_layer = ours_decode(batch) if decodes else ours_prefill(batch)
        layer = self.shape.layers - 1
        one_layer(layer)
        error = batch.error(layer)
        if not error <= TOLERANCE:
            print(f"{case.name}: FAIL, relative error {error:.2e}, limit {TOLERANCE:.0e}")
            self.failures.append(case.name)
            return
        # a prefill fills a GPU by itself and reads little
        count = self.shape.layers if decodes else min(4, self.shape.layers)
        versions = {"ours": lambda: _all(one_layer, count)}
        if decodes and self.device.type == "cuda":
            dependent = ours_decode(batch, pdl=True)
            versions["pdl"] = lambda: _all(dependent, count)
        times = measure({**versions, **peers(batch)}, self.replays, self.device)
        seconds = [one / count for one in times.pop("ours")]
        if "pdl" in times:
            with_pdl = statistics.median(times.pop("pdl")) / count * 1e6
            print(f"    with programmatic dependent launch: {with_pdl:.1f} µs")
        others_us = {
            name: statistics.median(of) / copied_layers(batch) * 1e6 for name, of in times.items()
        }
        for name, value in others_us.items():
            print(f"    {name} on contiguous keys and values: {value:.1f} µs")
        floor_us = case.kv_bytes(self.shape) / self.copy_rate * 1e6
        self.recorder.add(
            f"{case.name}: one layer",
            [one * 1e6 for one in seconds],
            "µs",
            better="lower",
            floor=floor_us,
            peer=min(others_us.values(), default=None),
        )
        if decodes:
            shares = [floor_us / (one * 1e6) for one in seconds]
            self.recorder.add(f"{case.name}: share of copy bandwidth", shares, "×", better="higher")
        else:
            rates = [case.operations(self.shape) / one / 1e12 for one in seconds]
            self.recorder.add(f"{case.name}: rate", rates, "TFLOP/s", better="higher")


def ours_decode(batch: Batch, pdl: bool = False) -> Callable[[int], None]:
    shape = batch.shape
    scratch = decode_scratch(
        len(batch.runs), shape.heads, shape.kv_heads, shape.dim, batch.q.device
    )

    arguments = (
        batch.q,
        batch.pages,
        batch.page_table,
        batch.rows,
        batch.row_seat,
        batch.positions,
    )

    def one_layer(layer: int) -> None:
        rest = (layer, shape.kv_heads, 0, batch.out, scratch)
        if pdl:
            decode_attention_triton(*arguments, *rest, pdl=True)
        else:
            decode_attention(*arguments, *rest)

    return one_layer


def ours_prefill(batch: Batch) -> Callable[[int], None]:
    shape = batch.shape
    tiles, count = batch.tiles(tile_rows(shape.heads, shape.kv_heads))

    def one_layer(layer: int) -> None:
        prefill_attention(
            batch.q, batch.pages, batch.page_table, tiles, count, layer, shape.kv_heads, 0,
            batch.out,
        )  # fmt: skip

    return one_layer


def _all(one_layer: Callable[[int], None], count: int) -> None:
    for layer in range(count):
        one_layer(layer)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="few replays; rows go elsewhere")
    parser.add_argument("--sweep", action="store_true", help="try tuning candidates, record none")
    parser.add_argument("--near", action="store_true", help="try splits of a few decode kernels")
    parser.add_argument("--seconds", type=float, default=150.0, help="of --sweep, at most")
    parser.add_argument("--out", type=Path, help="file for every line of --sweep")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        print("no GPU: a dry run of the references on tiny shapes; rows go elsewhere")
    shape = SHAPE_8B if on_gpu else TINY_SHAPE
    cases: tuple[Case, ...] = (*DECODES, *PREFILLS) if on_gpu else TINY
    if options.near:
        cases = NEAR if on_gpu else TINY[:2]
    torch.manual_seed(0)
    pages = make_pages(shape, max(case.positions for case in cases), device)
    if options.near:
        return sweep.near(cases, shape, pages)
    if options.sweep:
        return sweep.sweep(cases, shape, pages, options.seconds, options.out)
    partial = options.quick or not on_gpu
    hardware = "-".join(torch.cuda.get_device_name().lower().split()) if on_gpu else ""
    recorder = Recorder("attention", hardware, results=PARTIAL if partial else RESULTS)
    rate = copy_bytes_per_s(device)
    recorder.add("copy bandwidth", [rate / 1e12], "TB/s", better="higher")
    bench = Bench(device, shape, pages, rate, 7 if options.quick else 25, recorder)
    for case in cases:
        bench.run(case)
    print(f"wrong results: {', '.join(bench.failures) or 'none'}")
    return 1 if recorder.finish() or bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
