"""Registry and engine as real processes: what a client sees. max_loras=2, three adapters."""

from __future__ import annotations

import contextlib
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine_svc.cli.main import main as enginectl
from loraplex.engine.v1 import engine_pb2
from loraplex.status import from_rpc_error
from tests.support.engine_stack import Answer, Service, Stack, error_of
from tests.support.tiny_model import TINY_NAME
from tests.support.waiting import eventually

ADAPTERS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("serving")) as stack:
        stack.start_registry()
        stack.add_base_model()
        for seed, name in enumerate(ADAPTERS, start=1):
            stack.publish(name, seed, rank=4 * seed)
        stack.start_engine("--max-loras", "2")
        yield stack


def test_base_and_each_adapter_answer_with_their_own_tokens_and_identity(stack: Stack) -> None:
    answers = {name: stack.generate(name) for name in (TINY_NAME, *ADAPTERS)}
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 4
    for name, answer in answers.items():
        assert answer.started is not None
        assert answer.summary is not None
        assert answer.started.base_model == TINY_NAME
        assert answer.started.adapter.name == ("" if name == TINY_NAME else name)
        assert answer.summary.adapter == answer.started.adapter
        assert answer.summary.usage.completion_tokens == len(answer.token_ids) == 16
        assert answer.finished[0].reason == engine_pb2.FINISH_REASON_LENGTH
    assert answers["red"].started.adapter.digest.startswith("sha256:")  # type: ignore[union-attr]


def test_three_adapters_and_the_base_together_say_what_each_says_alone(stack: Stack) -> None:
    names = (TINY_NAME, *ADAPTERS) * 2
    alone = {name: stack.generate(name, max_tokens=48).token_ids for name in set(names)}
    with ThreadPoolExecutor(len(names)) as pool:
        together = list(pool.map(lambda name: stack.generate(name, max_tokens=48), names))
    assert [answer.token_ids for answer in together] == [alone[name] for name in names]
    assert stack.state().max_loras == 2


def test_never_more_than_max_loras_adapters_hold_a_place(stack: Stack) -> None:
    calls = [stack.stream(name, max_tokens=400) for name in ADAPTERS]
    seen: list[int] = []

    def look() -> bool:
        state = stack.state()
        holders = [one for one in state.residency if one.holds_place]
        seen.append(len(holders))
        return len({flow.adapter.name for flow in state.flows if flow.adapter.name}) == 3

    eventually(look)
    for call in calls:
        for _ in call:
            pass
        look()
    assert max(seen) <= 2


def test_cancelled_stream_gives_its_pages_back(stack: Stack) -> None:
    stack.generate("red")
    call = stack.stream("red", prompt="x" * 300, max_tokens=700)
    next(call)
    eventually(lambda: stack.state().running_sequences == 1)
    call.cancel()  # type: ignore[attr-defined]
    assert error_of(call).code() is grpc.StatusCode.CANCELLED
    eventually(lambda: not stack.state().flows)
    state = stack.state()
    assert state.running_sequences == 0
    memory = state.memory
    used = memory.kv_bytes + memory.adapters_bytes + memory.free_bytes
    assert used == memory.num_pages * memory.page_bytes


def test_deadline_ends_the_stream_and_frees_the_core(stack: Stack) -> None:
    # the core may take some of these: what counts is the code and that nothing is left behind
    error = error_of(stack.stream("green", prompt="x" * 200, max_tokens=800, timeout_s=0.2))
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: not stack.state().flows)


@pytest.mark.parametrize("name", ["nobody", "red@9", "red@sha256:" + "0" * 64])
def test_unknown_adapter_is_not_found_and_never_answered_by_the_base(
    stack: Stack, name: str
) -> None:
    call = stack.stream(name)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_version_published_later_and_one_unregistered_are_followed(stack: Stack) -> None:
    stack.publish("fresh", seed=7)
    first = eventually(lambda: _try_generate(stack, "fresh"))
    stack.publish("fresh", seed=8)
    second = eventually(lambda: _answer_of_version(stack, "fresh", 2))
    assert first.token_ids != second.token_ids
    assert stack.generate("fresh@1").token_ids == first.token_ids
    stack.registryctl("unregister", "fresh")
    error = eventually(lambda: _try_error(stack, "fresh"))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_a_corrupt_blob_fails_only_its_own_requests_with_data_loss(stack: Stack) -> None:
    folder = stack.publish("broken", seed=9)
    size = (folder / "adapter_model.safetensors").stat().st_size
    (blob,) = [
        path
        for path in stack.blobs.rglob("*")
        if path.is_file()
        and path.stat().st_size == size
        and path.read_bytes() == (folder / "adapter_model.safetensors").read_bytes()
    ]
    blob.chmod(0o600)
    with blob.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * 16)
    eventually(lambda: "broken" in [model.id for model in _models(stack)])
    good = stack.generate("red")
    call = stack.stream("red", max_tokens=300)
    error = error_of(stack.stream("broken"))
    assert error.code() is grpc.StatusCode.DATA_LOSS
    assert from_rpc_error(error).reason == "DIGEST_MISMATCH"
    others = Answer()
    for message in call:
        others.add(message)
    assert len(others.token_ids) == 300
    assert stack.generate("red").token_ids == good.token_ids


def test_health_and_reflection_answer(stack: Stack) -> None:
    health = health_pb2_grpc.HealthStub(stack.channel)
    for service in ("", "loraplex.engine.v1.Engine"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(stack.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=5)
    names = [service.name for service in answer.list_services_response.service]
    assert "loraplex.engine.v1.Engine" in names


def test_models_lists_the_base_and_each_adapter_with_its_parent(stack: Stack) -> None:
    models = {model.id: model for model in _models(stack)}
    assert models[TINY_NAME].parent == ""
    assert [models[name].parent for name in ADAPTERS] == [TINY_NAME] * 3
    assert models["blue"].max_rank == 12


def test_metrics_of_all_processes_are_served_at_one_address(stack: Stack) -> None:
    stack.generate("red")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def scrape() -> str:
        with opener.open(f"http://{stack.metrics_address}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
        return text

    text = scrape()
    for series in (
        'loraplex_request_ttft_seconds_count{adapter="red"}',
        'loraplex_requests_total{adapter="red",outcome="OK"}',
        'loraplex_adapter_load_seconds_count{adapter="red",tier="store"}',
        "loraplex_step_batch_size_count",
        'loraplex_step_seconds_count{part="gpu"}',
        'loraplex_gpu_memory_bytes{part="weights"}',
        "loraplex_registry_revision",
    ):
        assert series in text, series


def test_enginectl_shows_state_and_models(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    stack.generate("red")
    assert enginectl(["state", "--address", stack.engine_address]) == 0
    shown = capsys.readouterr().out
    assert "red" in shown
    assert f"base {TINY_NAME}" in shown
    assert enginectl(["models", "--address", stack.engine_address]) == 0
    assert "blue" in capsys.readouterr().out
    assert enginectl(["state", "--address", stack.engine_address, "--output", "json"]) == 0
    assert '"max_loras": 2' in capsys.readouterr().out


def test_a_second_engine_on_the_port_fails_naming_it(stack: Stack) -> None:
    args = stack.engine_args()
    args[args.index("--listen") + 1] = stack.engine_address
    second = Service("engine_svc.main", args, stack.folder, "second")
    assert second.process.wait(30) == 2
    port = stack.engine_address.rsplit(":", 1)[1]
    assert f"port {port} is taken" in second.log.read_text()


def test_many_clients_at_once_all_get_their_answers(stack: Stack) -> None:
    expected = {name: stack.generate(name, max_tokens=8).token_ids for name in ADAPTERS}
    barrier = threading.Barrier(30)

    def ask(index: int) -> bool:
        barrier.wait(30)
        name = ADAPTERS[index % 3]
        return stack.generate(name, max_tokens=8).token_ids == expected[name]

    with ThreadPoolExecutor(30) as pool:
        assert all(pool.map(ask, range(30)))


def _models(stack: Stack) -> list[engine_pb2.Model]:
    return list(stack.stub.ListModels(engine_pb2.ListModelsRequest(), timeout=10).models)


def _try_generate(stack: Stack, name: str) -> Answer | None:
    with contextlib.suppress(grpc.RpcError):
        return stack.generate(name)
    return None


def _try_error(stack: Stack, name: str) -> grpc.RpcError | None:
    try:
        stack.generate(name)
    except grpc.RpcError as error:
        return error
    return None


def _answer_of_version(stack: Stack, name: str, version: int) -> Answer | None:
    answer = stack.generate(name)
    assert answer.started is not None
    return answer if answer.started.adapter.version == version else None
