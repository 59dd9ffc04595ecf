"""`make bench-cpu`: the demo model on this machine's processor, through the whole stack.

Registry and engine run as real processes, clients stream over gRPC; the peer is transformers + PEFT
with one padded batch of mixed adapters. What is compared runs alternately in this one run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import grpc

from benchmarks.cpu.first_token import first_text_s, fresh_copy
from benchmarks.cpu.peft_peer import PeftPeer
from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder, end_on_signals
from benchmarks.shared.load import Load, Stream, demo_streams, run_load
from benchmarks.shared.process_memory import MIB, started_pss_bytes
from examples.demo_stack import (
    ADAPTERS,
    ADAPTERS_DIR,
    MODEL_DIR,
    MODEL_NAME,
    Stack,
    convert_model,
)
from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc

#: places for all three adapters, so that nothing rotates
ENGINE_ARGS = (
    "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--max-loras", "4",
    "--max-num-seqs", "16", "--max-model-len", "2048", "--drain-seconds", "3", "--device", "cpu",
)  # fmt: skip
REGISTRY_ARGS = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
NUM_STREAMS = 8
NUM_TOKENS = 64
ROUNDS = 5
IDLE, SERVING, FIRST_TOKEN = "idle", "serving", "first-token"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parts = (IDLE, SERVING, FIRST_TOKEN)
    parser.add_argument("--only", choices=parts, action="append", help="repeatable; default all")
    options = parser.parse_args()
    end_on_signals()
    chosen = options.only or parts
    # a part of the rows must not replace a whole run's
    recorder = Recorder("cpu", results=PARTIAL if options.only else RESULTS)
    convert_model()
    if FIRST_TOKEN in chosen:
        measure_first_token(recorder)
    if IDLE in chosen or SERVING in chosen:
        with (
            tempfile.TemporaryDirectory(prefix="lpx-bench-") as folder,
            Stack(Path(folder), quiet=True) as stack,
        ):
            measure_stack(stack, recorder, chosen, options.rounds)
    return recorder.finish()


def measure_first_token(recorder: Recorder) -> None:
    """The demo in a fresh copy of the checkout, then again in the same copy."""
    with fresh_copy() as copy:
        for run in ("first", "second"):
            recorder.add(f"first token, {run} run", [first_text_s(copy)], "s", better="lower")


def measure_stack(stack: Stack, recorder: Recorder, chosen: Sequence[str], rounds: int) -> None:
    stack.start_registry(*REGISTRY_ARGS)
    stack.add_base_model()
    engine = stack.start_engine(*ENGINE_ARGS)
    stack.publish()
    with insecure_channel(engine.address()) as channel:
        if IDLE in chosen:
            measure_idle(channel, recorder)
        if SERVING in chosen:
            measure_serving(channel, recorder, rounds)


def measure_idle(channel: grpc.Channel, recorder: Recorder) -> None:
    """PSS of all that this process started, before the first request: KV has no page yet."""
    state = engine_pb2_grpc.EngineStub(channel).GetEngineState(engine_pb2.GetEngineStateRequest())
    assert state.state.memory.kv_bytes == 0
    weights = state.state.memory.weights_bytes
    total = started_pss_bytes()
    recorder.add("model weights", [weights / MIB], "MiB", better="lower")
    rest = (total - weights) / MIB
    recorder.add("idle stack without weights and KV", [rest], "MiB", better="lower")


def measure_serving(channel: grpc.Channel, recorder: Recorder, rounds: int) -> None:
    """Three adapters, the base alone and the peer, one after the other in every round."""
    peer = PeftPeer(MODEL_DIR, [ADAPTERS_DIR / name for name in ADAPTERS])
    mixed = demo_streams(NUM_STREAMS)
    base = [replace(stream, model=MODEL_NAME) for stream in mixed]
    run_load(channel, [*mixed, *base[:1]], 4)
    peer.tokens_per_s(mixed, 4)
    loads: list[tuple[Load, Load, float]] = []
    for _ in range(rounds):
        loads.append(measure_round(channel, mixed, base, peer))
    ours = [adapters.tokens_per_s for adapters, _, _ in loads]
    theirs = [peer_rate for _, _, peer_rate in loads]
    against_base = [adapters.tpot_s / alone.tpot_s for adapters, alone, _ in loads]
    ttft = [1000 * one for adapters, _, _ in loads for one in adapters.ttft_s]
    tpot = [1000 * adapters.tpot_s for adapters, _, _ in loads]
    base_tpot = [1000 * alone.tpot_s for _, alone, _ in loads]
    peer_rate = statistics.median(theirs)
    recorder.add("throughput, 8 streams", ours, "tokens/s", better="higher", peer=peer_rate)
    against_peer = [a / b for a, b in zip(ours, theirs, strict=True)]
    recorder.add("throughput / transformers + PEFT", against_peer, "×", better="higher")
    recorder.add("TTFT, 8 streams, three adapters", ttft, "ms", better="lower")
    recorder.add("TPOT, 8 streams, three adapters", tpot, "ms", better="lower")
    recorder.add("TPOT, 8 streams, base", base_tpot, "ms", better="lower")
    recorder.add("TPOT of three adapters / base", against_base, "×", better="lower")


def measure_round(
    channel: grpc.Channel, mixed: Sequence[Stream], base: Sequence[Stream], peer: PeftPeer
) -> tuple[Load, Load, float]:
    return (
        run_load(channel, mixed, NUM_TOKENS),
        run_load(channel, base, NUM_TOKENS),
        peer.tokens_per_s(mixed, NUM_TOKENS),
    )


if __name__ == "__main__":
    sys.exit(main())
