"""Concurrent clients of an engine over gRPC: one thread a stream, all started together."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from benchmarks.shared.harness import ROOT
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc

STREAM_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Stream:
    """One request: its model's name ("" is for the caller to fill) and its only chat message."""

    model: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Load:
    """What a set of concurrent streams brought. `tpot_s` is the mean over the streams."""

    tokens: int
    wall_s: float
    ttft_s: tuple[float, ...]
    tpot_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def demo_streams(count: int) -> list[Stream]:
    """`count` streams that go round the demo's adapters and prompts."""
    prompts: dict[str, list[str]] = json.loads((ROOT / "examples" / "prompts.json").read_text())
    names = sorted(prompts)
    return [
        Stream(names[i % len(names)], prompts[names[i % len(names)]][i // len(names) % 3])
        for i in range(count)
    ]


def run_load(channel: grpc.Channel, streams: Sequence[Stream], num_tokens: int) -> Load:
    """Greedy streams of exactly `num_tokens` tokens each, all at once; no prompt is cached from an
    earlier load, as the peer has no such cache.

    Raises: grpc.RpcError of the first that fails; RuntimeError when one is short of tokens.
    """
    salt = uuid.uuid4().hex
    with ThreadPoolExecutor(len(streams)) as pool:
        began = time.monotonic()
        futures = [pool.submit(_stream, channel, stream, num_tokens, salt) for stream in streams]
        summaries = [future.result() for future in futures]
        wall_s = time.monotonic() - began
    counts = [summary.usage.completion_tokens for summary in summaries]
    if counts != [num_tokens] * len(streams):
        raise RuntimeError(f"streams brought {counts} tokens, expected {num_tokens} each")
    return Load(
        tokens=sum(counts),
        wall_s=wall_s,
        ttft_s=tuple(summary.ttft_s for summary in summaries),
        tpot_s=sum(summary.tpot_s for summary in summaries) / len(summaries),
    )


def _stream(
    channel: grpc.Channel, stream: Stream, num_tokens: int, cache_salt: str
) -> engine_pb2.Summary:
    message = engine_pb2.ChatMessage(role="user", content=stream.prompt)
    request = engine_pb2.GenerateRequest(
        model=stream.model,
        cache_salt=cache_salt,
        chat=engine_pb2.ChatMessages(messages=[message]),
        sampling=engine_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
    )
    summary = engine_pb2.Summary()
    stub = engine_pb2_grpc.EngineStub(channel)
    for response in stub.Generate(request, timeout=STREAM_TIMEOUT_S):
        if response.HasField("summary"):
            summary = response.summary
    return summary
