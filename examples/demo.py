"""The reference scenario, from nothing to NOT_FOUND: publish three adapters, stream from all of
them and from the base model at once with two places, read the bill, take one adapter away.

    make demo            (or, in an environment that has the packages: python examples/demo.py)
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.demo_stack import ADAPTERS, MODEL_NAME, ROOT, Stack, StackFailed, convert_model
from examples.demo_text import Printer, table
from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import from_rpc_error

PROMPTS = json.loads((ROOT / "examples" / "prompts.json").read_text())
BASE_PROMPT = "What is a database index? Answer in two sentences."
MAX_TOKENS = 48
STREAM_TIMEOUT_S = 180.0
#: two places for three adapters and the base: somebody always waits, everybody gets a turn
ENGINE_ARGS = (
    "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--max-loras", "2",
    "--max-num-seqs", "16", "--max-model-len", "2048", "--quantum", "64", "--drain-seconds", "3",
)  # fmt: skip
REGISTRY_ARGS = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")


@dataclass(slots=True)
class Answer:
    """What one stream brought."""

    model: str
    first_text_s: float = 0.0
    summaries: list[engine_pb2.Summary] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--keep", action="store_true", help="keep the demo's folder and its logs")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    runtime = ROOT / ".loraplex"
    runtime.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=runtime))
    try:
        _run(Stack(folder), options.max_tokens)
    except StackFailed as failure:
        print(f"demo: {failure}\ndemo: logs are kept in {folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; every process has ended", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        return 130
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _run(stack: Stack, max_tokens: int) -> None:
    started = time.monotonic()
    with stack:
        if convert_model():
            stack.say(f"Model written in {time.monotonic() - started:.1f} s")
        stack.start_registry(*REGISTRY_ARGS)
        stack.add_base_model()
        engine = stack.start_engine(*ENGINE_ARGS)
        stack.publish()
        stack.say("Waiting for the engine …")
        with insecure_channel(engine.address()) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            answers = _stream_all(stub, channel, max_tokens)
            first = min(answer.first_text_s for answer in answers) - started
            print(f"\nFirst text {first:.1f} s after the start\n")
            print(table([(answer.model, answer.summaries) for answer in answers]), flush=True)
            _unregister(stack, stub, ADAPTERS[-1])


def _stream_all(
    stub: engine_pb2_grpc.EngineStub, channel: grpc.Channel, max_tokens: int
) -> list[Answer]:
    """One stream a model, all at once; the first that fails, or Ctrl-C, ends the others."""
    models = (*ADAPTERS, MODEL_NAME)
    printer = Printer(models)
    print("\nFour streams at once, two places for adapters:\n", flush=True)
    with ThreadPoolExecutor(len(models)) as pool:
        futures = [pool.submit(_stream, stub, name, max_tokens, printer) for name in models]
        try:
            return [future.result() for future in futures]
        except BaseException:
            channel.close()
            raise


def _stream(
    stub: engine_pb2_grpc.EngineStub, model: str, max_tokens: int, printer: Printer
) -> Answer:
    answer = Answer(model)
    prompts = PROMPTS.get(model, [BASE_PROMPT])[:2]
    for prompt in prompts:
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
            raise StackFailed(f"{model}: {from_rpc_error(error)}") from error
        printer.end(model)
    return answer


def _unregister(stack: Stack, stub: engine_pb2_grpc.EngineStub, name: str) -> None:
    """Take an adapter away and show that a request for it is refused, never answered by the
    base."""
    print()
    stack.registryctl("unregister", name)
    request = engine_pb2.GenerateRequest(
        model=name, prompt="hello", sampling=engine_pb2.SamplingParams(max_tokens=1)
    )
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            list(stub.Generate(request, timeout=STREAM_TIMEOUT_S))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                print(f"{name} now answers {error.code().name}: {error.details()}")
                return
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise StackFailed(f"{name}: {from_rpc_error(error)}") from error
        time.sleep(0.1)
    raise StackFailed(f"{name} is still served 10 s after it was unregistered")


if __name__ == "__main__":
    sys.exit(main())
