"""`enginectl generate`: the same core, frontend code and adapter check, in one process."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_svc.cli.generate_arguments import sampling_of
from engine_svc.compose import LocalEngine, open_local_engine
from engine_svc.frontend.generate import GenerateCall
from engine_svc.settings import EngineSettings
from loraplex.engine.v1 import engine_pb2
from loraplex.status import NotFound


def generate(arguments: argparse.Namespace) -> None:
    """Stream the answer to standard output, then a summary. Raises: LoraplexError."""
    settings = EngineSettings(
        model=arguments.model,
        served_model_name=arguments.served_model_name,
        dtype=arguments.dtype,
        device=arguments.device,
        max_loras=max(1, len(arguments.adapter)),
    )
    folders = [Path(folder) for folder in arguments.adapter]
    with tempfile.TemporaryDirectory(prefix="lpx-") as scratch:
        engine = open_local_engine(
            settings,
            folders,
            Path(scratch),
            base_model_aliases=arguments.base_model_alias,
            base_model_confirmed=arguments.base_model_confirmed,
            max_saved_bytes=arguments.max_saved_bytes,
        )
        asyncio.run(_answer(engine, arguments))


async def _answer(engine: LocalEngine, arguments: argparse.Namespace) -> None:
    async with engine.serving() as serving:
        request = engine_pb2.GenerateRequest(
            model=_model(engine, arguments.use), sampling=sampling_of(arguments)
        )
        if arguments.chat:
            request.chat.CopyFrom(_chat(arguments))
        else:
            request.prompt = arguments.prompt
        await GenerateCall(serving, _Terminal()).run(request)


def _model(engine: LocalEngine, use: str) -> str:
    names = engine.adapter_names
    if not use:
        return names[0] if len(names) == 1 else engine.base_model
    if use not in (*names, engine.base_model):
        raise NotFound(
            f"--use is {use!r}; must be one of {', '.join((*names, engine.base_model))}",
            reason="MODEL_NOT_FOUND",
            metadata={"field": "--use", "value": use},
        )
    return use


def _chat(arguments: argparse.Namespace) -> engine_pb2.ChatMessages:
    messages = [engine_pb2.ChatMessage(role="user", content=arguments.prompt)]
    if arguments.system:
        messages.insert(0, engine_pb2.ChatMessage(role="system", content=arguments.system))
    return engine_pb2.ChatMessages(messages=messages)


@dataclass
class _Terminal:
    """A call's context that prints: several choices are printed one after the other at the end."""

    _texts: dict[int, str] = field(default_factory=dict)
    _adapter: str = ""

    async def write(self, message: engine_pb2.GenerateResponse) -> None:
        match message.WhichOneof("item"):
            case "started":
                self._adapter = message.started.adapter.name or message.started.base_model
            case "delta":
                self._print(message.delta.choice, message.delta.text)
            case "summary":
                self._end(message.summary)

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> Sequence[Any]:
        return ()

    def _print(self, choice: int, text: str) -> None:
        self._texts[choice] = self._texts.get(choice, "") + text
        if choice == 0:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _end(self, summary: engine_pb2.Summary) -> None:
        for choice, text in sorted(self._texts.items())[1:]:
            sys.stdout.write(f"\n--- choice {choice}\n{text}")
        sys.stdout.write("\n")
        sys.stdout.flush()
        usage = summary.usage
        print(
            f"{self._adapter}: {usage.prompt_tokens} prompt + {usage.completion_tokens} tokens, "
            f"load {summary.load_s:.2f} s, TTFT {summary.ttft_s:.2f} s, "
            f"TPOT {summary.tpot_s * 1000:.0f} ms",
            file=sys.stderr,
        )
