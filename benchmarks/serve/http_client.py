"""Requests of a trace to a server with OpenAI's completions: a thread for each open request.

`ignore_eos` and prompts of token ids are what vLLM and SGLang take beyond OpenAI's own fields.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serve.clients import Job, Outcome, Target, prompt_ids
from benchmarks.serve.grpc_client import Start

PATH = "/v1/completions"


def run_jobs(target: Target, jobs: Sequence[Job], cut_s: float, start: Start) -> None:
    bodies = [_body(target, job) for job in jobs]
    with ThreadPoolExecutor(max(1, len(jobs))) as pool:
        began_s = start.wait()
        futures = []
        for job, body in zip(jobs, bodies, strict=True):
            time.sleep(max(0.0, began_s + job.request.time - time.monotonic()))
            futures.append(pool.submit(_ask, target, job, body, began_s, cut_s))
        start.finish([future.result() for future in futures])


def _ask(target: Target, job: Job, body: bytes, began_s: float, cut_s: float) -> Outcome:
    sent_s = time.monotonic() - began_s
    times: list[float] = []
    tokens, ended_s, error = 0, -1.0, ""
    parts = urlsplit(target.address)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port or 80, timeout=max(0.001, cut_s - sent_s)
    )
    try:
        connection.request(
            "POST", parts.path.rstrip("/") + PATH, body, {"Content-Type": "application/json"}
        )
        socket = connection.sock
        response = connection.getresponse()
        if response.status != 200:
            return Outcome(
                job, sent_s, error=f"HTTP {response.status}: {response.read(200)!r:.200}"
            )
        for line in response:
            now_s = time.monotonic() - began_s
            if now_s >= cut_s:
                break
            socket.settimeout(cut_s - now_s)
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                ended_s = now_s
                break
            event = json.loads(content)
            if event.get("choices"):
                times.append(now_s)
            tokens = int((event.get("usage") or {}).get("completion_tokens") or tokens)
    except TimeoutError:
        pass  # cut
    except (OSError, ValueError, http.client.HTTPException) as failure:
        error = f"{type(failure).__name__}: {failure}"
    finally:
        connection.close()
    first_s, last_s = (times[0], times[-1]) if times else (-1.0, -1.0)
    # a server that does not count for us sends one token an event
    return Outcome(job, sent_s, first_s, last_s, ended_s, tokens or len(times), error)


def _body(target: Target, job: Job) -> bytes:
    request = job.request
    fields: dict[str, Any] = {
        "model": request.adapter or target.base,
        "prompt": prompt_ids(job, target.vocab_size),
        "max_tokens": request.output_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(fields).encode()
