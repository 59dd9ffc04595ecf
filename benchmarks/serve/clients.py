"""Clients of a served model, in several processes so that they are not what is measured.

A worker process takes every n-th request of a trace and sends each when it is due, whatever became
of those before it. Requests go to our engine over gRPC, or to any server with OpenAI's completions
over HTTP; prompts are token ids, drawn from the request's number.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from benchmarks.shared.trace import TraceRequest

#: seconds between the workers' being ready and time 0 of the trace
LEAD_S = 0.3
READY_TIMEOUT_S = 60.0
_MAX_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Target:
    """`address` is host:port of an engine, or http://host:port of another server.

    `base` is the model that an empty adapter means; `vocab_size` bounds the prompts' token ids.
    """

    address: str
    base: str
    vocab_size: int

    @property
    def is_http(self) -> bool:
        return self.address.startswith("http://")


@dataclass(frozen=True, slots=True)
class Job:
    """One request, numbered by its place in the trace."""

    number: int
    request: TraceRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job; times are seconds of the trace, −1: it never came to that.

    `error` "" with `ended_s` −1: cut off at the end of the measurement.
    """

    job: Job
    sent_s: float = -1.0
    first_s: float = -1.0
    last_s: float = -1.0
    ended_s: float = -1.0
    tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """From when it was due; only of one that started."""
        return self.first_s - self.job.request.time

    @property
    def tpot_s(self) -> float:
        """0 with less than two tokens."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


def prompt_ids(job: Job, vocab_size: int) -> list[int]:
    """Token ids that no other job of the trace begins with; none is 0."""
    span = vocab_size - 1
    first = 1 + job.number * 7919 % span
    second = 1 + job.number // span % span
    rest = (1 + (first * 31 + 17 * i) % span for i in range(job.request.prompt_tokens - 2))
    return [first, second, *rest][: job.request.prompt_tokens]


def num_workers() -> int:
    return max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)) // 2))


def run_trace(
    target: Target, requests: Sequence[TraceRequest], cut_s: float, workers: int = 0
) -> tuple[Outcome, ...]:
    """Send a trace; what has not ended at `cut_s` is cancelled. In the order of `requests`.

    Raises: RuntimeError when a worker process ends before its time.
    """
    count = min(workers or num_workers(), max(1, len(requests)))
    jobs = [Job(number, request) for number, request in enumerate(requests)]
    context = multiprocessing.get_context("spawn")
    links, processes = [], []
    try:
        for index in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            links.append(ours)
            ours.send((target, jobs[index::count], cut_s))
        for link in links:
            _receive(link, READY_TIMEOUT_S)
        began_s = time.monotonic() + LEAD_S
        for link in links:
            link.send(began_s)
        outcomes = [one for link in links for one in _receive(link, cut_s + READY_TIMEOUT_S)]
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return tuple(sorted(outcomes, key=lambda outcome: outcome.job.number))


def _receive(link: Connection, timeout_s: float) -> list[Outcome]:
    if not link.poll(timeout_s):
        raise RuntimeError(f"a client process said nothing for {timeout_s:g} s")
    try:
        message: list[Outcome] = link.recv()
    except EOFError:
        raise RuntimeError("a client process ended; see its error above") from None
    return message


def _work(link: Connection) -> None:
    """A worker's life: target and jobs, ready, time 0, outcomes."""
    target, jobs, cut_s = link.recv()
    if target.is_http:
        from benchmarks.serve.http_client import run_jobs
    else:
        from benchmarks.serve.grpc_client import run_jobs
    run_jobs(target, jobs, cut_s, _Start(link))


class _Start:
    """The parent's side of a worker: ready, then time 0; at the end the outcomes."""

    def __init__(self, link: Connection) -> None:
        self._link = link

    def wait(self) -> float:
        """Say that all is ready; returns time 0 on the monotonic clock."""
        self._link.send([])
        began_s: float = self._link.recv()
        return began_s

    def finish(self, outcomes: list[Outcome]) -> None:
        self._link.send(outcomes)
