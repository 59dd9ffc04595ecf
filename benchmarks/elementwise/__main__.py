"""`make bench-elementwise`: the kernels between the GEMMs, and sampling, on a GPU.

    consumers   residual add and norm, gated activation, rotation and store; with and without a
                LoRA delta, as dependent launches too; 8B shape
    sweep       the same with other sizes of a program
    sample      one step's tokens from logits, by what the rows ask for
    host        what a whole `GpuSampler.launch` costs the host

Launches stand in a CUDA graph, so a figure is a launch as a captured step has it, its inputs in L2
where they fit. Without a GPU nothing is timed: `--dry` runs each case once on small shapes, in
Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.elementwise import cases, sampling_cases
from benchmarks.shared.bandwidth import copy_bytes_per_s
from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder

PARTS = ("consumers", "sweep", "sample", "host")
#: launches a graph, graphs timed
LAUNCHES, ROUNDS = 24, 15


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elementwise", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--dry", action="store_true", help="no GPU: run, do not time")
    options = parser.parse_args(argv)
    parts = options.parts or PARTS
    if not options.dry and not torch.cuda.is_available():
        sys.exit("bench-elementwise needs an NVIDIA GPU; --dry runs without one")
    device = "cpu" if options.dry else "cuda"
    shape = cases.TINY if options.dry else cases.LLAMA
    name = "dry" if options.dry else torch.cuda.get_device_name().lower().replace(" ", "-")
    partial = options.dry or set(parts) != set(PARTS)
    results = PARTIAL if partial else RESULTS
    recorder = Recorder("elementwise", name, results)
    rate = 1.0 if options.dry else copy_bytes_per_s("cuda") / 1e6
    recorder.add("copy bandwidth", [rate / 1e3], "GB/s", better="higher")
    if "consumers" in parts:
        for case in cases.consumers(shape, device):
            record(recorder, case, rate, options.dry)
    if "sweep" in parts:
        for case in cases.sweep(shape, device):
            record(recorder, case, rate, options.dry)
    if "sample" in parts:
        for case in sampling_cases.samplers(shape, device):
            record(recorder, case, rate, options.dry)
    if "host" in parts:
        for title, launch in sampling_cases.hosts(shape, device):
            samples = [host_us(launch, 1 if options.dry else 20) for _ in range(3)]
            recorder.add(title, samples, "µs", better="lower")
    return recorder.finish()


def record(recorder: Recorder, case: cases.Case, rate: float, dry: bool) -> None:
    """One row; its floor is the case's bytes at the rate of a copy."""
    with case.tuned():
        samples = [host_us(case.launch, 1)] if dry else graph_us(case.launch)
    floor = case.num_bytes / rate
    row = recorder.add(case.title, samples, "µs", better="lower", floor=floor)
    print(f"{'':<44} floor {floor:8.2f}  share {floor / row.value:5.2f}", flush=True)


def graph_us(launch: Callable[[], object]) -> list[float]:
    """Microseconds of one launch inside a graph of LAUNCHES of them."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = []
    for _ in range(ROUNDS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return samples


def host_us(launch: Callable[[], object], count: int) -> float:
    """Microseconds until a call returns, over a few that the device is not waited for."""
    launch()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(count):
        launch()
    taken = time.perf_counter() - begun
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return taken * 1e6 / count


if __name__ == "__main__":
    sys.exit(main())
