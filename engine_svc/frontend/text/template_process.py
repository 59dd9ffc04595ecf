"""Renders adapters' chat templates in a process of its own, which may be killed at any time.

The process starts when the first adapter with its own template is asked for, knows no secret (its
environment is empty but for the import path), renders one chat at a time, and has limits that the
operating system enforces: MEMORY_LIMIT bytes above what it starts with, and RENDER_LIMIT_S
seconds a chat. When one is passed, the process dies, the request fails, the next one starts a new
process.

Each message is eight bytes of length and a JSON object, both ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from engine_svc.frontend.text.chat_template import ChatTemplate, ChatTemplateFailed, Message

MEMORY_LIMIT = 256 * 2**20
RENDER_LIMIT_S = 2.0
PENALTY_S = 30.0
_MAX_PENALTIES = 256
_START_LIMIT_S = 60.0
_LENGTH_BYTES = 8


class TemplateProcess:
    """The parent's end. Requests take turns."""

    def __init__(
        self, render_limit_s: float = RENDER_LIMIT_S, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._render_limit_s = render_limit_s
        self._now = now
        #: template source → (until when it is refused, why)
        self._penalties: dict[str, tuple[float, str]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Sequence[Message],
        add_generation_prompt: bool,
    ) -> str:
        """Raises: ChatTemplateFailed, also when a limit was passed."""
        job = json.dumps([source, dict(special_tokens), list(messages), add_generation_prompt])
        async with self._turn:
            self._check_penalty(source)
            process = self._process or await self._start()
            try:
                async with asyncio.timeout(self._render_limit_s):
                    answer = await _exchange(process, job.encode())
            except TimeoutError:
                await self.close()
                what = f"took longer than {self._render_limit_s:g} s"
                raise self._punished(source, what) from None
            except (asyncio.IncompleteReadError, ConnectionError):
                await self.close()
                what = f"needed more than {MEMORY_LIMIT} bytes, or ended its process"
                raise self._punished(source, what) from None
            except BaseException:
                await self.close()
                raise
        text, failure = json.loads(answer)
        if failure is not None:
            raise ChatTemplateFailed(failure, metadata={"field": "chat"})
        return str(text)

    async def close(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _check_penalty(self, source: str) -> None:
        until, what = self._penalties.get(source, (0.0, ""))
        if self._now() < until:
            raise _limit_passed(what)
        self._penalties.pop(source, None)

    def _punished(self, source: str, what: str) -> ChatTemplateFailed:
        while len(self._penalties) >= _MAX_PENALTIES:
            del self._penalties[next(iter(self._penalties))]
        self._penalties[source] = (self._now() + PENALTY_S, what)
        return _limit_passed(what)

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", __name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
        )  # fmt: skip
        self._process = process
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                await _read(process)
        except BaseException:
            await self.close()
            raise
        return process


async def _exchange(process: asyncio.subprocess.Process, job: bytes) -> bytes:
    assert process.stdin is not None
    process.stdin.write(len(job).to_bytes(_LENGTH_BYTES, "big") + job)
    await process.stdin.drain()
    return await _read(process)


async def _read(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    length = int.from_bytes(await process.stdout.readexactly(_LENGTH_BYTES), "big")
    return await process.stdout.readexactly(length)


def _limit_passed(what: str) -> ChatTemplateFailed:
    return ChatTemplateFailed(
        f"the adapter's chat template {what}; its publisher must simplify it",
        metadata={"field": "chat_template", "cause": what},
    )


# ---- the child's end


@functools.lru_cache(maxsize=32)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _answer(job: bytes) -> bytes:
    source, special_tokens, messages, add_generation_prompt = json.loads(job)
    text, failure = None, None
    try:
        template = _compiled(source, tuple(special_tokens.items()))
        text = template.render(messages, add_generation_prompt)
    except ChatTemplateFailed as error:
        failure = error.message
    except MemoryError:
        failure = f"the adapter's chat template needed more than {MEMORY_LIMIT} bytes"
    return json.dumps([text, failure]).encode()


def _limit_memory() -> None:
    with open("/proc/self/statm", "rb") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _send(stream: BinaryIO, message: bytes) -> None:
    stream.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)
    stream.flush()


def main() -> None:
    """Serve until the parent closes the pipe."""
    _limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    _send(target, b"")
    while len(head := source.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
        job = source.read(int.from_bytes(head, "big"))
        # the default action ends this process, also when the parent is gone
        signal.alarm(2 * int(RENDER_LIMIT_S) + 1)
        message = _answer(job)
        signal.alarm(0)
        _send(target, message)


if __name__ == "__main__":
    main()
