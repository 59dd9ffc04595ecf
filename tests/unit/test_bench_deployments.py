"""Parts of the benchmark of deployments: arrivals, open-loop clients, changed adapters, table."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.deployments.__main__ import FLEETS, METRICS, table
from benchmarks.deployments.fleets import changed_copy
from benchmarks.deployments.open_loop import Arrival, Target, poisson, run_open_loop
from benchmarks.shared.harness import Recorder
from benchmarks.shared.load import Stream
from benchmarks.shared.process_memory import tree_pss_bytes
from loraplex.adapter_format import CONFIG_FILE, WEIGHTS_FILE
from loraplex.channel import insecure_channel, loopback_options
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc

STREAMS = [Stream("a", "one"), Stream("b", "two")]


class FakeEngine(engine_pb2_grpc.EngineServicer):
    """Answers at once, but never where the model is called "silent"."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def Generate(
        self, request: engine_pb2.GenerateRequest, context: Any
    ) -> Iterator[engine_pb2.GenerateResponse]:
        self.asked.append(request.model)
        if request.model == "unknown":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such adapter")
        if request.model == "silent":
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait(10.0)
            return
        yield engine_pb2.GenerateResponse(started=engine_pb2.Started())
        yield engine_pb2.GenerateResponse(delta=engine_pb2.Delta(text="x"))
        usage = engine_pb2.Usage(completion_tokens=request.sampling.max_tokens)
        summary = engine_pb2.Summary(usage=usage, tpot_s=0.5)
        yield engine_pb2.GenerateResponse(summary=summary)


@pytest.fixture
def engine() -> Iterator[tuple[FakeEngine, grpc.Channel]]:
    fake = FakeEngine()
    server = grpc.server(ThreadPoolExecutor(4), options=loopback_options())
    engine_pb2_grpc.add_EngineServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with insecure_channel(f"127.0.0.1:{port}") as channel:
        yield fake, channel
    server.stop(None).wait()


def test_arrivals_of_one_seed_are_the_same_and_in_order() -> None:
    found = poisson(STREAMS, 5.0, 100.0, seed=3)
    assert found == poisson(STREAMS, 5.0, 100.0, seed=3)
    assert found != poisson(STREAMS, 5.0, 100.0, seed=4)
    due = [arrival.due_s for arrival in found]
    assert due == sorted(due)
    assert due[0] >= 0
    assert due[-1] < 100


def test_arrivals_have_the_rate_and_go_to_every_stream() -> None:
    found = poisson(STREAMS, 5.0, 400.0, seed=0)
    assert 1800 < len(found) < 2200
    share = sum(arrival.stream.model == "a" for arrival in found) / len(found)
    assert 0.45 < share < 0.55


def test_answers_keep_the_stream_and_ask_by_the_served_name(
    engine: tuple[FakeEngine, grpc.Channel],
) -> None:
    fake, channel = engine
    targets = {"a": Target(channel, "merged-a")}
    (answer,) = run_open_loop(targets, [Arrival(0.0, STREAMS[0])], 8)
    assert (answer.model, answer.tokens, answer.tpot_s) == ("a", 8, 0.5)
    assert answer.ttft_s > 0
    assert fake.asked == ["merged-a"]


def test_what_still_runs_is_cut_and_not_counted(engine: tuple[FakeEngine, grpc.Channel]) -> None:
    _, channel = engine
    targets = {"a": Target(channel, "silent"), "b": Target(channel, "b")}
    arrivals = [Arrival(0.0, stream) for stream in STREAMS]
    answers = run_open_loop(targets, arrivals, 1, cut_at_s=0.5)
    assert [answer.model for answer in answers] == ["b"]


def test_other_failures_end_the_benchmark(engine: tuple[FakeEngine, grpc.Channel]) -> None:
    _, channel = engine
    with pytest.raises(grpc.RpcError, match="no such adapter"):
        run_open_loop({"a": Target(channel, "unknown")}, [Arrival(0.0, STREAMS[0])], 1)


def test_changed_copies_differ_in_one_bit_each(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / CONFIG_FILE).write_text("{}")
    (adapter / WEIGHTS_FILE).write_bytes(bytes(16))
    contents = {
        (changed_copy(adapter, tmp_path / str(change), change) / WEIGHTS_FILE).read_bytes()
        for change in (1, 2, 3)
    }
    assert len(contents) == 3
    assert all(sum(byte.bit_count() for byte in content) == 1 for content in contents)


def test_memory_of_a_tree_holds_its_root() -> None:
    assert tree_pss_bytes(os.getpid()) > 1 << 20


def test_table_has_a_row_a_metric_and_marks_what_is_missing(tmp_path: Path) -> None:
    recorder = Recorder("deployments", "desk", tmp_path)
    case = f"{FLEETS[1].name}: {METRICS[0]}"
    recorder.add(case, [983.4], "MiB", better="lower")
    lines = table(recorder.rows).splitlines()
    assert len(lines) == 2 + len(METRICS)
    assert lines[2] == f"| {METRICS[0]} | - | 983 MiB | - |"
