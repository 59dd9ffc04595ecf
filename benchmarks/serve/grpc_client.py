"""Requests of a trace to our engine: one process, one event loop, a few connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Sequence
from typing import Protocol

import grpc

from benchmarks.serve.clients import Job, Outcome, Target, prompt_ids
from loraplex.channel import channel_options
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import from_rpc_error

#: connections of one worker: each is one frontend's, chosen by the kernel
CHANNELS = 4


class Start(Protocol):
    def wait(self) -> float: ...
    def finish(self, outcomes: list[Outcome]) -> None: ...


def run_jobs(target: Target, jobs: Sequence[Job], cut_s: float, start: Start) -> None:
    asyncio.run(_run(target, jobs, cut_s, start))


async def _run(target: Target, jobs: Sequence[Job], cut_s: float, start: Start) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stubs = []
        for _ in range(CHANNELS):
            options = [*channel_options(target.address), ("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(target.address, options=options)
            await stack.enter_async_context(channel)
            await channel.channel_ready()
            stubs.append(engine_pb2_grpc.EngineStub(channel))
        # no prompt is cached from an earlier run
        salt = uuid.uuid4().hex
        messages = [_message(target, job, salt) for job in jobs]
        began_s = await asyncio.to_thread(start.wait)
        tasks = []
        for index, (job, message) in enumerate(zip(jobs, messages, strict=True)):
            await asyncio.sleep(max(0.0, began_s + job.request.time - time.monotonic()))
            stub = stubs[index % CHANNELS]
            tasks.append(asyncio.create_task(_ask(stub, job, message, began_s, cut_s)))
        start.finish(list(await asyncio.gather(*tasks)))


async def _ask(
    stub: object, job: Job, message: engine_pb2.GenerateRequest, began_s: float, cut_s: float
) -> Outcome:
    """Without a deadline: the engine would refuse at once what it could not begin before it."""
    sent_s = time.monotonic() - began_s
    first_s = last_s = ended_s = -1.0
    tokens, error = 0, ""
    try:
        async with asyncio.timeout(max(0.0, cut_s - sent_s)):
            call = stub.Generate(message)  # type: ignore[attr-defined]
            async for response in call:
                if response.HasField("delta"):
                    last_s = time.monotonic() - began_s
                    if first_s < 0:
                        first_s = last_s
                    tokens += len(response.delta.token_ids)
        ended_s = time.monotonic() - began_s
    except TimeoutError:
        pass  # cut
    except grpc.RpcError as failure:
        error = from_rpc_error(failure).reason
    return Outcome(job, sent_s, first_s, last_s, ended_s, tokens, error)


def _message(target: Target, job: Job, cache_salt: str) -> engine_pb2.GenerateRequest:
    request = job.request
    return engine_pb2.GenerateRequest(
        model=request.adapter or target.base,
        cache_salt=cache_salt,
        token_ids=engine_pb2.TokenIds(ids=prompt_ids(job, target.vocab_size)),
        sampling=engine_pb2.SamplingParams(
            temperature=0, max_tokens=request.output_tokens, ignore_eos=True
        ),
    )
