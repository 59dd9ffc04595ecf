"""Clients that come when they come: arrivals are drawn before, and nobody waits for an answer.

An answer's TTFT counts from when its request was due, so that a server that keeps the clients from
asking does not look faster than it is.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from benchmarks.shared.load import STREAM_TIMEOUT_S, Stream
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import from_rpc_error


@dataclass(frozen=True, slots=True)
class Target:
    """Where one adapter is served, and under which name there."""

    channel: grpc.Channel
    model: str


@dataclass(frozen=True, slots=True)
class Arrival:
    due_s: float
    stream: Stream


@dataclass(frozen=True, slots=True)
class Answer:
    """`model` is the stream's own, whatever it is called where it is served."""

    model: str
    tokens: int
    ttft_s: float
    tpot_s: float


def poisson(
    streams: Sequence[Stream], per_s: float, seconds: float, seed: int
) -> tuple[Arrival, ...]:
    """Arrivals of a Poisson process, each with one of `streams`; the same for the same seed."""
    rng = random.Random(seed)
    found: list[Arrival] = []
    due_s = rng.expovariate(per_s)
    while due_s < seconds:
        found.append(Arrival(due_s, rng.choice(streams)))
        due_s += rng.expovariate(per_s)
    return tuple(found)


def run_open_loop(
    targets: Mapping[str, Target],
    arrivals: Sequence[Arrival],
    num_tokens: int,
    cut_at_s: float = STREAM_TIMEOUT_S,
) -> tuple[Answer, ...]:
    """Greedy requests of exactly `num_tokens` tokens, each when it is due.

    Args: cut_at_s, when those that still run are cancelled; they, and those that an engine refuses
    since they could not begin before it, are not among the answers.

    Raises: grpc.RpcError of one that fails otherwise.
    """
    salt = uuid.uuid4().hex
    ordered = sorted(arrivals, key=lambda arrival: arrival.due_s)
    with ThreadPoolExecutor(max(1, len(ordered))) as pool:
        began = time.monotonic()
        futures = []
        for arrival in ordered:
            time.sleep(max(0.0, began + arrival.due_s - time.monotonic()))
            target = targets[arrival.stream.model]
            futures.append(
                pool.submit(
                    _answer, target, arrival, num_tokens, salt,
                    began + arrival.due_s, began + cut_at_s,
                )
            )  # fmt: skip
        answers = [future.result() for future in futures]
    return tuple(answer for answer in answers if answer is not None)


def request_of(
    model: str, prompt: str, num_tokens: int, cache_salt: str
) -> engine_pb2.GenerateRequest:
    message = engine_pb2.ChatMessage(role="user", content=prompt)
    return engine_pb2.GenerateRequest(
        model=model,
        cache_salt=cache_salt,
        chat=engine_pb2.ChatMessages(messages=[message]),
        sampling=engine_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
    )


def _answer(
    target: Target, arrival: Arrival, num_tokens: int, salt: str, due_s: float, cut_at_s: float
) -> Answer | None:
    stream = arrival.stream
    request = request_of(target.model, stream.prompt, num_tokens, salt)
    stub = engine_pb2_grpc.EngineStub(target.channel)
    first_s, summary = 0.0, engine_pb2.Summary()
    try:
        for response in stub.Generate(request, timeout=max(0.001, cut_at_s - time.monotonic())):
            if response.HasField("delta") and not first_s:
                first_s = time.monotonic()
            if response.HasField("summary"):
                summary = response.summary
    except grpc.RpcError as error:
        # cut, or refused at once because it could not be served before the cut
        if from_rpc_error(error).reason in ("DEADLINE_EXCEEDED", "WAIT_EXCEEDS_DEADLINE"):
            return None
        raise
    if summary.usage.completion_tokens != num_tokens:
        raise RuntimeError(f"{summary.usage.completion_tokens} tokens came, expected {num_tokens}")
    return Answer(stream.model, num_tokens, first_s - due_s, summary.tpot_s)
