"""kill -9 and unreachable neighbours: who notices, what clients see, how soon it is well again.

One stack for all: every test leaves it serving.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import grpc
import pytest

from loraplex.channel import insecure_channel
from loraplex.engine.v1 import engine_pb2, engine_pb2_grpc
from loraplex.status import from_rpc_error
from tests.support.engine_stack import Answer, Service, Stack, error_of, wait_gone
from tests.support.tiny_model import TINY_NAME
from tests.support.waiting import eventually

#: from a process's death to the next answer; starting a core is most of it
RECOVERY_S = 30.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("faults")) as stack:
        stack.start_registry()
        stack.add_base_model()
        for seed, name in enumerate(("red", "green", "blue"), start=1):
            stack.publish(name, seed)
        # blue is left for the tests in which the store is away
        stack.start_engine("--max-loras", "2", "--frontends", "2")
        for name in ("red", "green"):
            stack.generate(name)
        yield stack


def engine_of(stack: Stack) -> Service:
    assert stack.engine is not None
    return stack.engine


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_gone([pid])


def answer_again(stack: Stack, name: str) -> Answer:
    """The first good answer; errors on the way must be UNAVAILABLE."""

    def attempt() -> Answer | None:
        with contextlib.ExitStack() as closing:
            channel = closing.enter_context(insecure_channel(stack.engine_address))
            stub = engine_pb2_grpc.EngineStub(channel)
            answer = Answer()
            try:
                for message in stub.Generate(greedy(name), timeout=20):
                    answer.add(message)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return None
                raise
            return answer

    return eventually(attempt, RECOVERY_S, every_s=0.05)


def greedy(name: str, max_tokens: int = 16) -> engine_pb2.GenerateRequest:
    sampling = engine_pb2.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return engine_pb2.GenerateRequest(model=name, prompt="once upon", sampling=sampling)


def test_a_killed_core_ends_streams_with_engine_lost_and_comes_back(stack: Stack) -> None:
    engine = engine_of(stack)
    before = stack.generate("red")
    (core,), (loader,) = engine.children("core"), engine.children("loader")
    call = stack.stream("red", max_tokens=900)
    next(call)
    began = time.monotonic()
    kill(core)
    error = error_of(call)
    assert time.monotonic() - began < 5.0
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    lost = from_rpc_error(error)
    assert lost.reason == "ENGINE_LOST"
    assert int(lost.metadata["tokens_delivered"]) >= 0
    assert answer_again(stack, "red").token_ids == before.token_ids
    assert engine.children("loader") == [loader]
    assert engine.children("core") != [core]


def test_a_killed_loader_leaves_resident_adapters_serving_and_comes_back(stack: Stack) -> None:
    engine = engine_of(stack)
    expected = stack.generate("red")
    (loader,) = engine.children("loader")
    call = stack.stream("red", max_tokens=400)
    next(call)
    os.kill(loader, signal.SIGKILL)
    assert stack.generate("red").token_ids == expected.token_ids
    answer = Answer()
    for message in call:
        answer.add(message)
    assert answer.summary is not None
    eventually(lambda: engine.children("loader") not in ([], [loader]), RECOVERY_S)
    stack.publish("later", seed=11)
    eventually(lambda: "later" in model_ids(stack), RECOVERY_S)
    assert len(stack.generate("later").token_ids) == 16


def test_a_want_whose_loader_dies_is_asked_again_of_the_next_one(stack: Stack) -> None:
    engine = engine_of(stack)
    stack.publish("slow", seed=12)
    eventually(lambda: "slow" in model_ids(stack))
    (loader,) = engine.children("loader")
    os.kill(loader, signal.SIGSTOP)
    call = stack.stream("slow")
    eventually(lambda: [flow for flow in stack.state().flows if flow.adapter.name == "slow"])
    kill(loader)
    answer = Answer()
    for message in call:
        answer.add(message)
    assert len(answer.token_ids) == 16


def test_a_killed_frontend_loses_only_its_own_streams_and_comes_back(stack: Stack) -> None:
    engine = engine_of(stack)
    frontends = engine.children("frontend")
    assert len(frontends) == 2
    channels = [insecure_channel_of_its_own(stack.engine_address) for _ in range(8)]
    calls = [
        engine_pb2_grpc.EngineStub(channel).Generate(greedy("red", 300), timeout=60)
        for channel in channels
    ]
    for call in calls:
        next(call)
    kill(frontends[0])
    outcomes = [outcome(call) for call in calls]
    assert set(outcomes) <= {None, grpc.StatusCode.UNAVAILABLE}
    eventually(lambda: not stack_state(stack).flows)
    eventually(lambda: frontends_are_serving(engine), RECOVERY_S)
    for channel in channels:
        channel.close()
    assert len(answer_again(stack, "green").token_ids) == 16


def test_a_frontend_that_stops_reading_is_replaced_and_the_core_goes_on(stack: Stack) -> None:
    engine = engine_of(stack)
    (core,) = engine.children("core")
    frontends = engine.children("frontend")
    channels = [insecure_channel_of_its_own(stack.engine_address) for _ in range(8)]
    request = greedy("red", 900)
    request.sampling.logprobs = 20  # large messages, so that the socket is soon full
    calls = [
        engine_pb2_grpc.EngineStub(channel).Generate(request, timeout=60) for channel in channels
    ]
    for call in calls:  # kept: a call that nobody holds is cancelled
        next(call)
    for pid in frontends:
        os.kill(pid, signal.SIGSTOP)
    # the socket and the outbox fill up, a second passes
    eventually(lambda: engine.events("frontend.stalled"), RECOVERY_S)
    for pid in frontends:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for channel in channels:
        channel.close()
    eventually(lambda: frontends_are_serving(engine), RECOVERY_S)
    assert len(answer_again(stack, "red").token_ids) == 16
    assert engine.children("core") == [core]


def test_a_registry_that_goes_away_and_returns_loses_no_event(stack: Stack) -> None:
    assert stack.registry is not None
    stack.registry.kill()
    assert len(stack.generate("red").token_ids) == 16
    assert TINY_NAME in model_ids(stack)
    stack.start_registry()
    stack.publish("after-restart", seed=13)
    eventually(lambda: "after-restart" in model_ids(stack), RECOVERY_S)
    assert len(stack.generate("after-restart").token_ids) == 16


def test_with_the_blob_store_away_resident_ones_serve_and_others_are_unavailable(
    stack: Stack,
) -> None:
    stack.generate("red")
    away = stack.blobs.with_name("blobs-away")
    stack.blobs.rename(away)
    stack.blobs.write_text("not a folder")
    try:
        began = time.monotonic()
        error = error_of(stack.stream("blue"))
        assert time.monotonic() - began < 20.0
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        refused = from_rpc_error(error)
        assert refused.reason == "BLOB_STORE_UNREACHABLE"
        assert refused.retry_after_s is not None
        assert len(stack.generate("red").token_ids) == 16
    finally:
        stack.blobs.unlink()
        away.rename(stack.blobs)
    assert len(answer_again(stack, "blue").token_ids) == 16


def test_a_killed_supervisor_takes_every_process_with_it(stack: Stack) -> None:
    engine = engine_of(stack)
    pids = [pid for role in ("core", "loader", "frontend") for pid in engine.children(role)]
    assert len(pids) == 4
    engine.kill()
    wait_gone(pids)


def model_ids(stack: Stack) -> list[str]:
    with insecure_channel(stack.engine_address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        answer = stub.ListModels(engine_pb2.ListModelsRequest(), timeout=10)
        return [model.id for model in answer.models]


def stack_state(stack: Stack) -> engine_pb2.EngineState:
    with insecure_channel(stack.engine_address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        return stub.GetEngineState(engine_pb2.GetEngineStateRequest(), timeout=10).state


def frontends_are_serving(engine: Service) -> bool:
    """Every frontend that was started last has said that it is ready."""
    state: dict[object, bool] = {}
    for event in ("process.started", "process.waiting", "process.ended", "process.ready"):
        for line in engine.events(event):
            state[line["time"], line["name"]] = event == "process.ready"
    latest = {name: ready for (_, name), ready in sorted(state.items(), key=str)}
    return all(latest[name] for name in ("frontend-0", "frontend-1"))


def insecure_channel_of_its_own(address: str) -> grpc.Channel:
    """One connection for itself, so that the kernel may give it to any frontend."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(address, options=options)


def outcome(call: Iterator[engine_pb2.GenerateResponse]) -> grpc.StatusCode | None:
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None
