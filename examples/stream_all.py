"""Stream from the base model and its adapters at once, and show what each answer cost.

python examples/stream_all.py [--engine 127.0.0.1:50052]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.demo_text import Printer, table
from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import LoraplexError, from_rpc_error

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = json.loads((ROOT / "examples" / "prompts.json").read_text())
BASE_PROMPT = "What is a database index? Answer in two sentences."
PROMPTS_A_MODEL = 2
MAX_TOKENS = 48
STREAM_TIMEOUT_S = 180.0


@dataclass(slots=True)
class Answer:
    """What the streams of one model brought."""

    model: str
    first_text_s: float = 0.0
    summaries: list[engine_pb2.Summary] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    default = os.environ.get("LORAPLEX_ENGINE_ADDRESS", "127.0.0.1:50052")
    parser.add_argument("--engine", default=default, help="host:port")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    options = parser.parse_args()
    try:
        with insecure_channel(options.engine) as channel:
            answers = stream_all(channel, list_models(channel), options.max_tokens)
    except LoraplexError as error:
        print(f"{options.engine}: {error}", file=sys.stderr)
        return 1
    print("\n" + cost_table(answers))
    return 0


def list_models(channel: grpc.Channel) -> list[str]:
    """The adapters that have demo prompts, then the base. Raises: LoraplexError."""
    try:
        request = engine_pb2.ListModelsRequest(page_size=1000)
        models = engine_pb2_grpc.EngineStub(channel).ListModels(request, timeout=30.0).models
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    adapters = [model.id for model in models if model.parent and model.id in PROMPTS]
    return adapters + [model.id for model in models if not model.parent]


def stream_all(channel: grpc.Channel, models: Sequence[str], max_tokens: int) -> list[Answer]:
    """One client a model, all at once; the first that fails, or Ctrl-C, ends the others.

    Raises: LoraplexError.
    """
    printer = Printer(models)
    with ThreadPoolExecutor(len(models)) as pool:
        futures = [pool.submit(_ask, channel, name, max_tokens, printer) for name in models]
        try:
            return [future.result() for future in futures]
        except BaseException:
            channel.close()
            raise


def cost_table(answers: Sequence[Answer]) -> str:
    return table([(answer.model, answer.summaries) for answer in answers])


def _ask(channel: grpc.Channel, model: str, max_tokens: int, printer: Printer) -> Answer:
    """The demo's prompts for one model, one after the other."""
    answer = Answer(model)
    stub = engine_pb2_grpc.EngineStub(channel)
    for prompt in PROMPTS.get(model, [BASE_PROMPT])[:PROMPTS_A_MODEL]:
        printer.title(model, prompt)
        request = engine_pb2.GenerateRequest(
            model=model,
            chat=engine_pb2.ChatMessages(
                messages=[engine_pb2.ChatMessage(role="user", content=prompt)]
            ),
            sampling=engine_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens),
        )
        try:
            for response in stub.Generate(request, timeout=STREAM_TIMEOUT_S):
                if response.HasField("delta"):
                    answer.first_text_s = answer.first_text_s or time.monotonic()
                    printer.text(model, response.delta.text)
                elif response.HasField("summary"):
                    answer.summaries.append(response.summary)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        printer.end(model)
    return answer


if __name__ == "__main__":
    sys.exit(main())
