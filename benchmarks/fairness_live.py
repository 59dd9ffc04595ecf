"""`make bench-fairness-live`: twelve adapters on two places of a real engine that is saturated.

The demo model on this machine's processor, through gRPC. Once with turns, once with the field's
policy (`--policy resident-first`), which keeps a place while its adapter has work: two adapters
come first, with more clients than the engine has seats. Waits are counted in the engine's own steps
against the bound that GetEngineState showed when they began.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copytree

import grpc

from benchmarks.fairness.meter import jain
from benchmarks.fairness.watch import WaitWatch
from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder, end_on_signals
from benchmarks.shared.load import Stream, demo_streams
from examples.demo_stack import ADAPTERS, ADAPTERS_DIR, MODEL_NAME, Stack, convert_model
from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc

NAMES = tuple(f"{ADAPTERS[i % 3]}-{i // 3}" for i in range(12))
MAX_LORAS, SEATS = 2, 8
#: clients of the two that come first, and of each other
RESIDENT_CLIENTS, CLIENTS = SEATS, 3
#: answers of unlike lengths: never do all of an adapter's end in one step
ANSWER_TOKENS = (17, 23, 31, 41)
ENGINE_ARGS = (
    "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--device", "cpu",
    "--max-loras", str(MAX_LORAS), "--max-num-seqs", str(SEATS), "--max-model-len", "1024",
    "--max-num-batched-tokens", "64", "--turn-max-steps", "24", "--closing-steps", "4",
    "--max-queue-wait", "600", "--drain-seconds", "1",
)  # fmt: skip
REGISTRY_ARGS = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
FAIR, RESIDENT = "fair", "resident-first"
SECONDS = 60.0
LOOK_EVERY_S = 0.02
START_TIMEOUT_S = 60.0


@dataclass
class Clients:
    """Threads that ask again as soon as they are answered, until the channel is closed."""

    channel: grpc.Channel
    tokens: Counter[str] = field(default_factory=Counter)
    threads: list[threading.Thread] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def start(self, stream: Stream, count: int) -> None:
        for _ in range(count):
            lengths = itertools.cycle(ANSWER_TOKENS[len(self.threads) % len(ANSWER_TOKENS) :])
            thread = threading.Thread(target=self._ask, args=(stream, lengths))
            self.threads.append(thread)
            thread.start()

    def _ask(self, stream: Stream, lengths: Iterator[int]) -> None:
        stub = engine_pb2_grpc.EngineStub(self.channel)
        message = engine_pb2.ChatMessage(role="user", content=stream.prompt)
        while not self.stopping.is_set():
            request = engine_pb2.GenerateRequest(
                model=stream.model,
                chat=engine_pb2.ChatMessages(messages=[message]),
                sampling=engine_pb2.SamplingParams(
                    temperature=0, max_tokens=next(lengths), ignore_eos=True
                ),
            )
            try:
                for response in stub.Generate(request):
                    self.tokens[stream.model] += len(response.delta.token_ids)
            except (grpc.RpcError, ValueError):  # ValueError: the channel was closed before
                if not self.stopping.is_set():
                    raise

    def stop(self) -> None:
        self.stopping.set()
        self.channel.close()
        for thread in self.threads:
            thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="fewer: not recorded")
    options = parser.parse_args()
    end_on_signals()
    whole = options.seconds >= SECONDS
    recorder = Recorder("fairness_live", results=RESULTS if whole else PARTIAL)
    convert_model()
    with (
        tempfile.TemporaryDirectory(prefix="lpx-bench-") as folder,
        Stack(Path(folder), quiet=True) as stack,
    ):
        stack.start_registry(*REGISTRY_ARGS)
        stack.add_base_model()
        publish(stack)
        for policy in (FAIR, RESIDENT):
            measure(stack, recorder, policy, options.seconds)
    return recorder.finish()


def publish(stack: Stack) -> None:
    """The demo's adapters under four names each; other alphas make them other adapters."""
    for number, name in enumerate(NAMES):
        folder = stack.folder / name
        copytree(ADAPTERS_DIR / ADAPTERS[number % 3], folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["lora_alpha"] += number // 3
        (folder / "adapter_config.json").write_text(json.dumps(config))
        stack.registryctl("register", name, str(folder), "--base-model", MODEL_NAME)


@contextmanager
def crowd(stack: Stack, policy: str) -> Iterator[Clients]:
    """The residents first; the others when those hold both places and all seats."""
    engine = stack.start_engine(*ENGINE_ARGS, "--policy", policy)
    prompts = [stream.prompt for stream in demo_streams(len(NAMES))]
    streams = [Stream(*pair) for pair in zip(NAMES, prompts, strict=True)]
    clients = Clients(insecure_channel(engine.address()))
    try:
        for stream in streams[:MAX_LORAS]:
            clients.start(stream, RESIDENT_CLIENTS)
        wait_until_full(clients.channel)
        clients.tokens.clear()
        for stream in streams[MAX_LORAS:]:
            clients.start(stream, CLIENTS)
        yield clients
    finally:
        clients.stop()
        engine.terminate()
        engine.wait()


def wait_until_full(channel: grpc.Channel) -> None:
    """Raises: TimeoutError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while state_of(channel).running_sequences < SEATS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first two adapters fill no {SEATS} seats")
        time.sleep(LOOK_EVERY_S)


def state_of(channel: grpc.Channel) -> engine_pb2.EngineState:
    stub = engine_pb2_grpc.EngineStub(channel)
    state: engine_pb2.EngineState = stub.GetEngineState(
        engine_pb2.GetEngineStateRequest(), timeout=30
    ).state
    return state


def measure(stack: Stack, recorder: Recorder, policy: str, seconds: float) -> None:
    watch = WaitWatch()
    with crowd(stack, policy) as clients:
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            watch.look(state_of(clients.channel), time.monotonic())
            time.sleep(LOOK_EVERY_S)
        wall_s = time.monotonic() - began
        tokens = [clients.tokens[name] for name in NAMES]
    record(recorder, policy, watch, tokens, wall_s)


def record(
    recorder: Recorder, policy: str, watch: WaitWatch, tokens: Sequence[int], wall_s: float
) -> None:
    worst = [watch.worst[name] for name in NAMES if name in watch.worst]
    for what, value, unit, better in (
        ("worst wait / bound", max(one.of_bound for one in worst), "×", "lower"),
        ("worst wait / bound in seconds", max(one.of_bound_s for one in worst), "×", "lower"),
        ("worst wait", max(one.seconds for one in worst), "s", "lower"),
        ("adapters that got a token", sum(count > 0 for count in tokens), "of 12", "higher"),
        ("Jain index of tokens", jain(tokens), "", "higher"),
        ("throughput", sum(tokens) / wall_s, "tokens/s", "higher"),
    ):
        recorder.add(f"{policy}: {what}", [value], unit, better=better)


if __name__ == "__main__":
    sys.exit(main())
