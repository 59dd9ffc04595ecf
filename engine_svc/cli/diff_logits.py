"""`enginectl diff-logits`: served logits against PEFT's, on a prompt and PEFT's greedy answer."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine_svc.cli.adapter_source import adapter_folder, names_base
from engine_svc.cli.peft_logits import PeftLogits
from engine_svc.cli.served_logits import ServedLogits
from engine_svc.frontend.inputs import PromptReader
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.settings import EngineSettings
from engine_svc.types import AdapterRef
from loraplex.base_folder import find_base_folder, read_base_folder
from loraplex.engine.v1 import engine_pb2
from loraplex.status import FieldInvalid


@dataclass(frozen=True, slots=True)
class Choice:
    """The likeliest token of one side, and how far the second one is behind it."""

    token_id: int
    text: str
    margin: float


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """Positions count from 0; the logits at a position choose the token after it."""

    adapter: str
    dtype: str
    prompt_tokens: int
    positions: int
    largest_difference: float
    largest_at: int
    #: the largest difference that the adapter itself makes, in PEFT
    adapter_effect: float
    first_differing: int | None
    served: Choice | None
    peft: Choice | None


def compare(
    served: torch.Tensor, peft: torch.Tensor, text_of: Any
) -> tuple[float, int, int | None, Choice | None, Choice | None]:
    """Largest difference and its position; first position of other likeliest tokens, with both."""
    by_position = (served - peft).abs().amax(dim=1)
    at = int(by_position.argmax())
    differs = (served.argmax(dim=1) != peft.argmax(dim=1)).nonzero().flatten().tolist()
    if not differs:
        return float(by_position[at]), at, None, None, None
    first = differs[0]

    def choice(row: torch.Tensor) -> Choice:
        best = row.topk(2)
        token = int(best.indices[0])
        return Choice(token, text_of([token]), float(best.values[0] - best.values[1]))

    return float(by_position[at]), at, first, choice(served[first]), choice(peft[first])


def diff_logits(arguments: argparse.Namespace) -> None:
    """Print a LogitDifference. Raises: LoraplexError."""
    if arguments.tokens < 0:
        raise FieldInvalid("--tokens", arguments.tokens, "a whole number from 0")
    folder = find_base_folder(arguments.model)
    settings = EngineSettings(
        model=arguments.model, served_model_name=arguments.served_model_name,
        dtype=arguments.dtype, device=arguments.device, max_loras=1,
    )  # fmt: skip
    aliases = (arguments.model, *arguments.base_model_alias)
    facts, _, _ = read_base_folder(folder, settings.base_model_name, aliases)
    text = ModelText.load(folder)
    with tempfile.TemporaryDirectory(prefix="lpx-") as scratch:
        adapter = adapter_folder(arguments, Path(scratch))
        served = ServedLogits(
            settings, facts, adapter, Path(scratch),
            base_model_confirmed=not names_base(arguments),
        )  # fmt: skip
        try:
            prompt = asyncio.run(_prompt_ids(text, arguments, served.ref))
            oracle = PeftLogits(folder, adapter)
            found = _difference(arguments, served, oracle, prompt, text)
        finally:
            served.close()
    _print(found, arguments.output)


def _difference(
    arguments: argparse.Namespace,
    served: ServedLogits,
    oracle: PeftLogits,
    prompt: list[int],
    text: ModelText,
) -> LogitDifference:
    base = oracle.of_base(prompt)
    # the token after the last one is compared too, so one less is appended
    tokens = oracle.continued(prompt, max(0, arguments.tokens - 1))
    theirs, ours = oracle.of_adapter(tokens), served.of_adapter(tokens)
    effect = float((theirs[: len(prompt)] - base).abs().max())
    largest, at, first, our_choice, their_choice = compare(
        ours, theirs, lambda ids: text.tokenizer.backend.decode(ids, skip_special_tokens=False)
    )
    return LogitDifference(
        arguments.adapter, served.dtype, len(prompt), len(tokens), largest, at, effect, first,
        our_choice, their_choice,
    )  # fmt: skip


async def _prompt_ids(
    text: ModelText, arguments: argparse.Namespace, adapter: AdapterRef
) -> list[int]:
    request = engine_pb2.GenerateRequest()
    if arguments.chat:
        message = engine_pb2.ChatMessage(role="user", content=arguments.prompt)
        request.chat.CopyFrom(engine_pb2.ChatMessages(messages=[message]))
    else:
        request.prompt = arguments.prompt
    reader = PromptReader(text)
    try:
        return list((await reader.read(request, adapter)).token_ids)
    finally:
        await reader.close()


def _print(found: LogitDifference, output: str) -> None:
    if output == "json":
        print(json.dumps(asdict(found), indent=2, ensure_ascii=False))
        return
    print(
        f"{found.adapter}: {found.positions} positions, {found.prompt_tokens} of them the prompt's;"
        f" served in {found.dtype}, PEFT in float32\n"
        f"largest difference of a logit  {found.largest_difference:.2e}, at position "
        f"{found.largest_at}\n"
        f"the adapter's own effect       {found.adapter_effect:.2e}"
    )
    if found.first_differing is None or found.served is None or found.peft is None:
        print("likeliest tokens               the same everywhere")
        return
    print(f"likeliest tokens               differ first at position {found.first_differing}")
    for side, choice in (("served", found.served), ("PEFT", found.peft)):
        print(f"  {side:6}  {choice.token_id} {choice.text!r}, {choice.margin:.2e} before the next")
