"""`make bench-serve`: open-loop traces through gRPC, on our own stack or against any server.

Without --target: a registry with a thousand adapters and an engine of the 8B shape with random
weights are started, and measured: a start with shards in the page cache, what gRPC and two
frontends leave of the core's throughput, a load of many adapters on few places and on as many as
seats, and Punica's load by the popularity of adapters. With
--target one trace is sent to a server that runs already: host:port is one of our engines,
http://host:port any with OpenAI's completions. docs/compare.md shows how to compare
servers with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.serve.clients import Target, run_trace
from benchmarks.serve.fleet import adapter_names
from benchmarks.serve.options import read_options
from benchmarks.serve.parts import measure
from benchmarks.serve.report import by_popularity, print_report, record, report
from benchmarks.serve.stack import BenchStack, Serving
from benchmarks.shared.harness import PARTIAL, Recorder, end_on_signals
from benchmarks.shared.trace import (
    TraceInvalid,
    TraceRequest,
    punica,
    read_trace,
    slora,
    write_trace,
)

#: a disk cache that holds no adapter: as for the peer, what the host lacks comes from a file in the
#: page cache
FULL = Serving("8b", "cuda", 1000, 16, 8, 32, 256, 1024, 2048, 0, "12GiB", "64MiB", 2)
TINY = Serving("tiny", "cpu", 8, 4, 2, 4, 16, 256, 512, 64 << 20, "64MiB", "64MiB", 1)


def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(argv, (__doc__ or "").splitlines()[0])
    end_on_signals()
    if options.target:
        return _against_target(options)
    serving = replace(FULL if options.shape == "8b" else TINY, device=options.device)
    if options.adapters:
        serving = replace(serving, adapters=options.adapters)
    with (
        tempfile.TemporaryDirectory(prefix="lpx-bench-", dir=options.scratch) as scratch,
        BenchStack(Path(scratch), serving) as stack,
    ):
        if options.prepare:
            seconds = stack.fill(options.clients)
            stack.keep_database(options.prepare)
            print(f"{serving.adapters} adapters published in {seconds:.0f} s")
            return 0
        return measure(options, serving, stack)


def _against_target(options: argparse.Namespace) -> int:
    """One trace to a running server; rows go beside the partial ones."""
    try:
        requests, ranked = _workload(options)
    except (TraceInvalid, OSError) as error:
        print(f"bench-serve: {error}", file=sys.stderr)
        return 2
    if options.write_trace:
        write_trace(options.write_trace, requests)
        print(f"{len(requests)} requests written to {options.write_trace}")
    cut_s = options.cut or requests[-1].time + 60.0
    target = Target(options.target, options.base_model, options.vocab_size)
    outcomes = run_trace(target, requests, cut_s, options.workers)
    found = report(outcomes, ranked, cut_s)
    print_report(found)
    recorder = Recorder("serve-target", "target", options.results or PARTIAL)
    record(recorder, options.workload, found, outcomes)
    return 0 if found.total.finished else 1


def _workload(options: argparse.Namespace) -> tuple[Sequence[TraceRequest], Sequence[str]]:
    """The requests, and the adapters in the order of their popularity."""
    if options.trace:
        requests = read_trace(options.trace, options.context_tokens)
        return requests, by_popularity(requests)
    names = adapter_names(options.adapters or 100, options.adapter_name)
    per_s, seconds, seed = options.rate or 5.0, options.seconds or 20.0, options.seed
    if options.workload == "punica":
        requests = punica(names, options.popularity, per_s, seconds, seed, options.context_tokens)
    else:
        requests = slora(names, per_s, seconds, seed, high=min(512, options.context_tokens // 2))
    if not requests:
        raise TraceInvalid(f"no request in {seconds:g} s at {per_s:g}/s; raise --rate or --seconds")
    return requests, names


if __name__ == "__main__":
    sys.exit(main())
