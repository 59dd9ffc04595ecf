"""The reference scenario, from nothing to NOT_FOUND: publish three adapters, stream from all of
them and from the base model at once with two places, read the bill, take one adapter away.

    make demo            (or, in an environment that has the packages: python examples/demo.py)
    make demo ARGS="--model DIR --adapters DIR --device cuda"       (a model of your own)
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.demo_stack import (
    ADAPTERS,
    ADAPTERS_DIR,
    MODEL_DIR,
    ROOT,
    Stack,
    StackFailed,
    convert_model,
)
from examples.stream_all import MAX_TOKENS, cost_table, stream_all
from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import LoraplexError, from_rpc_error

#: two places for three adapters and the base: somebody always waits, everybody gets a turn
ENGINE_ARGS = (
    "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--max-loras", "2",
    "--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--max-model-len", "2048",
    "--quantum", "64", "--drain-seconds", "3",
)  # fmt: skip
REGISTRY_ARGS = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
#: an engine applies an event of the registry within milliseconds
UNREGISTER_TIMEOUT_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--keep", action="store_true", help="keep the demo's folder and its logs")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--model", type=Path, help="folder of a base model with a chat template; needs --adapters"
    )
    parser.add_argument(
        "--adapters", type=Path, help="folder of that model's adapters, published by folder name"
    )
    options = parser.parse_args()
    names = ADAPTERS if options.adapters is None else adapter_names(options.adapters)
    if (options.model is None) != (options.adapters is None):
        parser.error("--model and --adapters are given together or not at all")
    if not names:
        parser.error(f"--adapters: {options.adapters} holds no folder with adapter_config.json")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    runtime = ROOT / ".loraplex"
    runtime.mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=runtime))
    try:
        stack = Stack(folder, model=options.model.resolve() if options.model else MODEL_DIR)
        adapters = options.adapters.resolve() if options.adapters else ADAPTERS_DIR
        run(stack, adapters, names, options.device, options.max_tokens)
    except (StackFailed, LoraplexError) as failure:
        print(f"demo: {failure}\ndemo: logs are kept in {folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; every process has ended", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        return 128 + signal.SIGINT
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def adapter_names(folder: Path) -> tuple[str, ...]:
    """The folders in it that PEFT wrote."""
    return tuple(sorted(path.parent.name for path in folder.glob("*/adapter_config.json")))


def run(stack: Stack, adapters: Path, names: Sequence[str], device: str, max_tokens: int) -> None:
    """The whole scenario. Raises: StackFailed, LoraplexError."""
    started = time.monotonic()
    with stack:
        if stack.model == MODEL_DIR and convert_model():
            stack.say(f"Model written in {time.monotonic() - started:.1f} s")
        stack.start_registry(*REGISTRY_ARGS)
        stack.add_base_model()
        engine = stack.start_engine(*ENGINE_ARGS, "--device", device)
        stack.publish(names, adapters)
        stack.say("Waiting for the engine …")
        with insecure_channel(engine.address()) as channel:
            models = (*names, stack.model.name)
            print(f"\n{len(models)} clients at once, two places for adapters:\n", flush=True)
            answers = stream_all(channel, models, max_tokens)
            first_s = min(answer.first_text_s for answer in answers) - started
            print(f"\nFirst text {first_s:.1f} s after the start\n\n{cost_table(answers)}\n")
            stack.registryctl("unregister", names[-1])
            error = refusal(channel, names[-1])
            print(f"{names[-1]} now answers {error.code.name}: {error}", flush=True)


def refusal(channel: grpc.Channel, model: str) -> LoraplexError:
    """The NOT_FOUND of an unregistered adapter, once the engine has applied the event.

    Raises: StackFailed, when the adapter is still served; LoraplexError, any other error.
    """
    request = engine_pb2.GenerateRequest(
        model=model, prompt="hello", sampling=engine_pb2.SamplingParams(max_tokens=1)
    )
    deadline = time.monotonic() + UNREGISTER_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            list(engine_pb2_grpc.EngineStub(channel).Generate(request, timeout=30.0))
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
            if error.code is grpc.StatusCode.NOT_FOUND:
                return error
            if error.reason != "VERSION_NOT_ACTIVE":
                raise error from failure
        time.sleep(0.1)
    raise StackFailed(f"{model} is still served {UNREGISTER_TIMEOUT_S:.0f} s after unregister")


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
