"""`make bench-serve`: open-loop traces through gRPC, on our own stack or against any server.

Without --target: a registry with a thousand adapters and an engine of the 8B shape with random
weights are started, and three things measured: the start, what gRPC and two frontends leave of the
core's throughput, and a load of many adapters on few places. With --target one trace is sent to a
server that runs already: host:port is one of our engines, http://host:port any with OpenAI's
completions. docs/compare.md shows how both are used to compare servers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import RESULTS, ROOT, Recorder, cpu_name, end_on_signals
from benchmarks.serve_clients import Target, run_trace
from benchmarks.serve_fleet import adapter_names
from benchmarks.serve_report import by_popularity, print_report, record, report
from benchmarks.serve_stack import BenchStack, Serving, in_process, words
from benchmarks.trace import (
    POPULARITIES,
    TraceInvalid,
    TraceRequest,
    punica,
    read_trace,
    slora,
    write_trace,
)

PARTIAL = ROOT / ".loraplex" / "benchmarks"
EFFICIENCY, MANY = PARTS = ("efficiency", "many")
SEED = 20261129
#: vLLM 0.26.0 on one H200, same shape and load, measured on 2026-11-29
PEER_FINISHED_PER_S, PEER_TTFT_P99_S, PEER_LAST_DECILE = 11.2, 34.9, 0.07

#: a disk cache that holds no adapter: as for the peer, what the host lacks comes from a file in the
#: page cache
FULL = Serving("8b", "cuda", 1000, 16, 8, 32, 256, 8192, 2048, 0, "12GiB", "64MiB", 2)
TINY = Serving("tiny", "cpu", 8, 4, 2, 4, 16, 256, 512, 64 << 20, "64MiB", "64MiB", 1)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
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
        return _on_our_stack(options, serving, stack)


def _on_our_stack(options: argparse.Namespace, serving: Serving, stack: BenchStack) -> int:
    is_full = options.shape == "8b" and not options.only and not options.quick
    name = "serve" if options.shape == "8b" else "serve-tiny"
    hardware = _gpu_name() if serving.device == "cuda" else cpu_name()
    recorder = Recorder(name, hardware, options.results or (RESULTS if is_full else PARTIAL))
    parts = options.only or PARTS
    if options.prepared:
        stack.restore(options.prepared)
    else:
        seconds = stack.fill(options.clients)
        recorder.add("publish an adapter", [seconds / serving.adapters], "s", better="lower")
    alone: list[float] = []
    streams, prompt, output = (256, 32, 512) if options.shape == "8b" else (8, 16, 32)
    rounds = 1 if options.quick else 3
    if EFFICIENCY in parts:
        found = in_process(stack.model, serving, streams, prompt, output, rounds)
        alone = list(found["tokens_per_s"])
        case = f"in-process, {streams} streams"
        recorder.add(case, alone, "tokens/s", better="higher")
    target, took_s = stack.start_engine(*words(options.engine_arg))
    recorder.add("start to SERVING", [took_s], "s", better="lower")
    if EFFICIENCY in parts:
        once = [TraceRequest(0.0, "", prompt, output)] * streams
        rates = [_closed_loop(target, once, options.workers) for _ in range(rounds + 1)][1:]
        case = f"gRPC, {serving.frontends} frontends, {streams} streams"
        recorder.add(case, rates, "tokens/s", better="higher")
        share = statistics.median(rates) / statistics.median(alone)
        recorder.add("gRPC / in-process", [share], "×", better="higher")
    if MANY in parts:
        _many_adapters(options, recorder, target, stack.names, serving.context_tokens)
    return recorder.finish()


def _closed_loop(target: Target, requests: Sequence[TraceRequest], workers: int) -> float:
    """Tokens a second from the first request sent to the last token. Raises: RuntimeError."""
    outcomes = run_trace(target, requests, 600.0, workers)
    failed = [one.error or "cut" for one in outcomes if one.ended_s < 0]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    seconds = max(one.ended_s for one in outcomes) - min(one.sent_s for one in outcomes)
    return sum(one.tokens for one in outcomes) / seconds


def _many_adapters(
    options: argparse.Namespace,
    recorder: Recorder,
    target: Target,
    names: Sequence[str],
    context_tokens: int,
) -> None:
    """Poisson arrivals over many adapters, popularity 1/rank, cut like the peer's run."""
    per_s, seconds, cut_s = options.rate or 40.0, options.seconds or 20.0, options.cut or 40.0
    high = min(512, context_tokens // 2)
    requests = slora(names, per_s, seconds, options.seed, high=high)
    outcomes = run_trace(target, requests, cut_s, options.workers)
    found = report(outcomes, names, cut_s)
    print_report(found)
    title = f"{len(names)} adapters at {per_s:g}/s"
    record(recorder, title, found, outcomes)
    if options.shape == "8b":
        ratio = found.finished_per_s / PEER_FINISHED_PER_S
        recorder.add(f"{title}: finished / peer", [ratio], "×", better="higher")
        print(f"peer: {PEER_FINISHED_PER_S} finished/s, TTFT p99 {PEER_TTFT_P99_S} s, "
              f"last decile {PEER_LAST_DECILE:.0%} started")  # fmt: skip


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


def _gpu_name() -> str:
    from benchmarks.step_floor import device_name

    return device_name("cuda", "")


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--target", default="", help="host:port of an engine, or http://host:port; default: ours")
    add("--base-model", default="", help="what the target calls the model without an adapter")
    add("--workload", choices=("slora", "punica"), default="slora")
    add("--popularity", choices=POPULARITIES, default="zipf", help="of punica")
    add("--trace", type=Path, help="JSONL of your own; instead of --workload")
    add("--write-trace", type=Path, help="keep what was sent, for another server")
    add("--adapters", type=int, default=0, help="default 100, on our own stack 1000")
    add("--adapter-name", default="adapter-{index:04d}", help="names at the target")
    add("--rate", type=float, default=0.0, help="requests a second; default 5, on ours 40")
    add("--seconds", type=float, default=0.0, help="of arrivals; default 20")
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


if __name__ == "__main__":
    sys.exit(main())
