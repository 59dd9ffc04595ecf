"""Our own stack under load: a start, gRPC against the bare core, many adapters on few places and on
as many places as seats, and Punica's four popularities there."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import traceback
from collections.abc import Callable, Sequence

from benchmarks.serve.clients import Target, run_trace
from benchmarks.serve.options import EFFICIENCY, MANY, PARTS, PLACES, PUNICA, START
from benchmarks.serve.report import Report, by_popularity, print_report, record, report
from benchmarks.serve.stack import BenchStack, Serving, in_process, starts_s, words
from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder, cpu_name
from benchmarks.shared.trace import POPULARITIES, TraceRequest, punica, slora

#: vLLM 0.26.0 on one H200, same shape and load, measured on 2026-11-29
PEER_FINISHED_PER_S, PEER_TTFT_P99_S, PEER_LAST_DECILE = 11.2, 34.9, 0.07


def measure(options: argparse.Namespace, serving: Serving, stack: BenchStack) -> int:
    """All parts that were asked for. Returns: the exit status."""
    is_full = options.shape == "8b" and not options.only and not options.quick
    name = "serve" if options.shape == "8b" else "serve-tiny"
    recorder = Recorder(
        name, _hardware(serving.device), options.results or (RESULTS if is_full else PARTIAL)
    )
    parts = options.only or PARTS
    alone: list[float] = []
    #: what serves several parts runs for any of them
    measures: tuple[tuple[set[str], Callable[[], None]], ...] = (
        ({START}, lambda: _starts(recorder, serving, stack)),
        ({EFFICIENCY}, lambda: _alone(options, recorder, serving, stack, alone)),
        ({EFFICIENCY, MANY, PLACES, PUNICA}, lambda: _registered(options, recorder, stack)),
        ({EFFICIENCY, MANY}, lambda: _few_places(options, recorder, serving, stack, alone)),
        ({PLACES, PUNICA}, lambda: _place_a_seat(options, recorder, serving, stack)),
    )
    failed = False
    for served, measure in measures:
        if served & set(parts):
            try:
                measure()
            except Exception:
                # the other parts are still worth their time on a GPU
                traceback.print_exc()
                print(f"FAIL {', '.join(sorted(served))} broke off", flush=True)
                failed = True
    return max(recorder.finish(), int(failed))


def _starts(recorder: Recorder, serving: Serving, stack: BenchStack) -> None:
    first, again = starts_s(stack.folder, serving, 2)
    recorder.add("start to SERVING, first", [first], "s", better="lower")
    recorder.add("start to SERVING", [again], "s", better="lower")


def _alone(
    options: argparse.Namespace,
    recorder: Recorder,
    serving: Serving,
    stack: BenchStack,
    rates: list[float],
) -> None:
    """The core without frontends, before any engine holds the GPU; appends to `rates`."""
    streams, prompt, output, rounds = _closed_size(options)
    found = in_process(stack.model, serving, streams, prompt, output, rounds)
    rates.extend(found["tokens_per_s"])
    recorder.add(f"in-process, {streams} streams", rates, "tokens/s", better="higher")


def _registered(options: argparse.Namespace, recorder: Recorder, stack: BenchStack) -> None:
    """A registry that has all the adapters."""
    if options.prepared:
        stack.restore(options.prepared)
    else:
        seconds = stack.fill(options.clients)
        recorder.add("publish an adapter", [seconds / len(stack.names)], "s", better="lower")


def _few_places(
    options: argparse.Namespace,
    recorder: Recorder,
    serving: Serving,
    stack: BenchStack,
    alone: Sequence[float],
) -> None:
    """One engine: the same streams as `alone`, if that was measured, then many adapters."""
    with stack.engine(*words(options.engine_arg)) as (target, took_s):
        recorder.add("start to SERVING, dummy weights", [took_s], "s", better="lower")
        parts = options.only or PARTS
        if alone:
            streams, prompt, output, rounds = _closed_size(options)
            once = [TraceRequest(0.0, "", prompt, output)] * streams
            rates = [_closed_loop(target, once, options.workers) for _ in range(rounds + 1)][1:]
            case = f"gRPC, {serving.frontends} frontends, {streams} streams"
            recorder.add(case, rates, "tokens/s", better="higher")
            share = statistics.median(rates) / statistics.median(alone)
            recorder.add("gRPC / in-process", [share], "×", better="higher")
        if MANY in parts:
            title, found = _many_adapters(options, recorder, target, stack.names, serving)
            if options.shape == "8b":
                ratio = found.finished_per_s / PEER_FINISHED_PER_S
                recorder.add(f"{title}: finished / peer", [ratio], "×", better="higher")
                print(f"peer: {PEER_FINISHED_PER_S} finished/s, TTFT p99 {PEER_TTFT_P99_S} s, "
                      f"last decile {PEER_LAST_DECILE:.0%} started")  # fmt: skip


def _place_a_seat(
    options: argparse.Namespace, recorder: Recorder, serving: Serving, stack: BenchStack
) -> None:
    """An engine in which no adapter waits for a place, as a GPU's is if nobody says otherwise."""
    places = ("--max-loras", str(serving.max_num_seqs))
    with stack.engine(*places, *words(options.engine_arg)) as (target, _):
        parts = options.only or PARTS
        if PLACES in parts:
            suffix = f", {serving.max_num_seqs} places"
            _many_adapters(options, recorder, target, stack.names, serving, suffix)
        if PUNICA in parts:
            _punica(options, recorder, target, stack.names, serving.context_tokens)


def _closed_size(options: argparse.Namespace) -> tuple[int, int, int, int]:
    """Streams, prompt, output, rounds: mostly decodes, since those are what frontends carry."""
    rounds = 1 if options.quick else 3
    return (256, 32, 512, rounds) if options.shape == "8b" else (8, 16, 32, rounds)


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
    serving: Serving,
    suffix: str = "",
) -> tuple[str, Report]:
    """Poisson arrivals over many adapters, popularity 1/rank, cut like the peer's run. Returns: the
    title of its rows, and what they say."""
    per_s, seconds, cut_s = options.rate or 40.0, options.seconds or 20.0, options.cut or 40.0
    high = min(512, serving.context_tokens // 2)
    requests = slora(names, per_s, seconds, options.seed, high=high)
    outcomes = run_trace(target, requests, cut_s, options.workers)
    found = report(outcomes, names, cut_s)
    title = f"{len(names)} adapters at {per_s:g}/s{suffix}"
    print(title)
    print_report(found)
    record(recorder, title, found, outcomes)
    return title, found


def _punica(
    options: argparse.Namespace,
    recorder: Recorder,
    target: Target,
    names: Sequence[str],
    context_tokens: int,
) -> None:
    """The same arrivals and lengths over one adapter, over few and over as many as requests. What
    adapters cost a token: TPOT over that of one for all."""
    per_s, seconds = options.rate or 10.0, options.seconds or 5.0
    tpot: dict[str, float] = {}
    for popularity in reversed(POPULARITIES):
        requests = punica(names, popularity, per_s, seconds, options.seed, context_tokens)
        cut_s = options.cut or 60.0
        outcomes = run_trace(target, requests, cut_s, options.workers)
        found = report(outcomes, by_popularity(requests), cut_s)
        title = f"Punica's load at {per_s:g}/s, {popularity}"
        print(title)
        print_report(found)
        record(recorder, title, found, outcomes)
        tpot[popularity] = found.total.tpot_p50
    if min(tpot.values()) > 0:
        for popularity in POPULARITIES[:-1]:
            ratio = tpot[popularity] / tpot["identical"]
            case = f"Punica's load: TPOT, {popularity} / identical"
            recorder.add(case, [ratio], "×", better="lower")


def _hardware(device: str) -> str:
    """A folder's name; the GPU is asked without taking any of it."""
    if device != "cuda":
        return cpu_name()
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return "-".join(done.stdout.splitlines()[0].lower().split())
