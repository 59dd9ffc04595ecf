"""ListModels, engine state, health, reflection, refusals and records, over a real socket."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from engine_svc.frontend.core_link import LinkPhase
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.names import AliasEntry
from engine_svc.snapshots import CoreSnapshot, FlowSnapshot, MemorySnapshot, ResidentAdapter
from engine_svc.types import FlowKey, ServiceClass
from loraplex.engine.v1 import engine_pb2
from loraplex.status import LoraplexError, from_rpc_error
from tests.support.fake_core_link import FakeCoreLink
from tests.support.frontend_server import (
    BASE,
    Frontend,
    adapter,
    error_of,
    name_map,
    running_frontend,
)

ENGINE = "loraplex.engine.v1.Engine"


@pytest.fixture(scope="module")
def text(demo_model_dir: Path) -> ModelText:
    return ModelText.load(demo_model_dir)


async def refusal_of(call: Any) -> LoraplexError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def models_of(frontend: Frontend, tenant: str = "default", size: int = 0) -> list[list[str]]:
    """All pages: the ids on each."""
    pages, token = [], ""
    while True:
        page = await frontend.stub.ListModels(
            engine_pb2.ListModelsRequest(page_size=size, page_token=token),
            metadata=(("x-loraplex-tenant", tenant),),
        )
        pages.append([model.id for model in page.models])
        token = page.next_page_token
        if not token:
            return pages


async def test_models_are_the_base_and_its_adapters_with_parent(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        answer = await frontend.stub.ListModels(engine_pb2.ListModelsRequest())
    base, *adapters = answer.models
    assert (base.id, base.parent, base.context_tokens) == (BASE, "", 8192)
    assert [model.id for model in adapters] == ["kefu-lora", "sql-lora"]
    assert {model.parent for model in adapters} == {BASE}
    assert adapters[0].adapter.digest == "sha256:kefu-lora-1"
    assert adapters[0].max_rank == 8


@pytest.mark.parametrize("size", [1, 2, 3, 4])
async def test_pages_hold_every_model_once(size: int, text: ModelText) -> None:
    names = name_map(*(adapter(name) for name in ("c", "a", "b")))
    async with running_frontend(text, names=names) as frontend:
        pages = await models_of(frontend, size=size)
    assert [model for page in pages for model in page] == [BASE, "a", "b", "c"]
    assert max(len(page) for page in pages) == size
    assert all(pages)


async def test_a_tenant_sees_and_uses_its_own_and_public_adapters_only(text: ModelText) -> None:
    names = name_map(
        adapter("mine", tenant="one"), adapter("theirs", tenant="two"), adapter("all", public=True)
    )
    async with running_frontend(text, names=names) as frontend:
        assert await models_of(frontend, "one") == [[BASE, "all", "mine"]]
        await frontend.answer(model="mine", prompt="x", tenant="one")
        error = await frontend.refusal(model="theirs", prompt="x", tenant="one")
        assert [request.flow.tenant for request in frontend.link.requests] == ["one"]
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert "theirs" not in error.metadata["suggestions"]


@pytest.mark.parametrize("token", ["!", "bW9kZWxz", "bW9kZWxzOjI6YQ==", "🦥"])
async def test_a_foreign_page_token_is_refused(token: str, text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        request = engine_pb2.ListModelsRequest(page_token=token)
        error = await refusal_of(frontend.stub.ListModels(request))
    assert error.reason == "PAGE_TOKEN_INVALID"


@pytest.mark.parametrize("size", [-1, 1001])
async def test_a_page_size_outside_its_limits_is_refused(size: int, text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        request = engine_pb2.ListModelsRequest(page_size=size)
        error = await refusal_of(frontend.stub.ListModels(request))
    assert error.metadata == {"field": "page_size", "value": str(size), "limit": "in 0 … 1000"}


@pytest.mark.parametrize("model", ["unknown", "sql-lor", "SQL-LORA", "../etc/passwd", "a@9"])
async def test_an_unknown_model_is_not_found_and_never_the_base(
    model: str, text: ModelText
) -> None:
    async with running_frontend(text) as frontend:
        error = await frontend.refusal(model=model, prompt="x")
        assert frontend.link.requests == []
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert error.reason in ("MODEL_NOT_FOUND", "ADAPTER_NOT_FOUND")


async def test_a_near_miss_gets_suggestions(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        adapter_error = await frontend.refusal(model="sql-lora2", prompt="x")
        base_error = await frontend.refusal(model=BASE + "s", prompt="x")
    assert adapter_error.metadata["suggestions"].startswith("sql-lora")
    assert base_error.metadata["base_model"] == BASE


async def test_an_alias_answers_as_its_adapter(text: ModelText) -> None:
    names = name_map(adapter("sql-lora"), aliases=[AliasEntry("prod", "sql-lora")])
    async with running_frontend(text, names=names) as frontend:
        messages = await frontend.answer(model="prod", prompt="x")
    assert messages[0].started.adapter.name == "sql-lora"


async def test_engine_state_shows_what_the_core_says(text: ModelText) -> None:
    ref = adapter("sql-lora")
    state = CoreSnapshot(
        steps=11,
        max_loras=2,
        running_sequences=3,
        waiting_sequences=4,
        memory=MemorySnapshot(weights_bytes=100, num_pages=9),
        residents=(ResidentAdapter(ref, "slot", 77, holds_place=True),),
        flows=(
            FlowSnapshot(FlowKey(ServiceClass.BATCH, "one", ref.digest), ref, waiting=5),
            FlowSnapshot(FlowKey(ServiceClass.INTERACTIVE, "one", ""), running=1),
        ),
    )
    async with running_frontend(text, FakeCoreLink(state=state)) as frontend:
        answer = await frontend.stub.GetEngineState(engine_pb2.GetEngineStateRequest())
        watch = frontend.stub.WatchEngineState(engine_pb2.WatchEngineStateRequest(interval_s=0.1))
        seen = [(await watch.read()).state for _ in range(2)]
        watch.cancel()
    shown = answer.state
    assert seen == [shown, shown]
    assert (shown.engine_id, shown.base_model, shown.registry_revision) == ("engine-1", BASE, 7)
    assert (shown.steps, shown.max_loras) == (11, 2)
    assert (shown.running_sequences, shown.waiting_sequences) == (3, 4)
    assert (shown.memory.weights_bytes, shown.memory.num_pages) == (100, 9)
    (resident,) = shown.residency
    assert resident.adapter.name == "sql-lora"
    assert (resident.tier, resident.bytes) == (engine_pb2.RESIDENCY_TIER_SLOT, 77)
    assert resident.holds_place
    assert [flow.adapter.name for flow in shown.flows] == ["sql-lora", ""]
    assert shown.flows[0].service_class == engine_pb2.SERVICE_CLASS_BATCH
    assert shown.flows[0].waiting == 5


async def test_a_drain_ends_watches_with_a_status(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        request = engine_pb2.WatchEngineStateRequest(interval_s=600)
        watch = frontend.stub.WatchEngineState(request)
        await watch.read()
        drain = asyncio.create_task(frontend.server.drain(5.0))
        error = await refusal_of(watch.read())
        await drain
    assert error.reason == "DRAINING"


async def test_before_serving_there_is_no_list_and_no_state(text: ModelText) -> None:
    async with running_frontend(text, FakeCoreLink(phase=LinkPhase.STARTING)) as frontend:
        listed = await refusal_of(frontend.stub.ListModels(engine_pb2.ListModelsRequest()))
        state = await refusal_of(frontend.stub.GetEngineState(engine_pb2.GetEngineStateRequest()))
    assert (listed.reason, state.reason) == ("STARTING", "STARTING")


@pytest.mark.parametrize("interval_s", [-1.0, 0.01, float("nan"), float("inf")])
async def test_a_watch_interval_outside_its_limits_is_refused(
    interval_s: float, text: ModelText
) -> None:
    async with running_frontend(text) as frontend:
        request = engine_pb2.WatchEngineStateRequest(interval_s=interval_s)
        call = frontend.stub.WatchEngineState(request)
        error = await refusal_of(call.read())
    assert error.metadata["field"] == "interval_s"


async def test_declared_but_unserved_methods_say_so(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        calls = [
            frontend.stub.WarmAdapter(engine_pb2.WarmAdapterRequest(adapter="sql-lora")),
            frontend.stub.PinAdapter(engine_pb2.PinAdapterRequest(adapter="sql-lora")),
            frontend.stub.UnpinAdapter(engine_pb2.UnpinAdapterRequest(adapter="sql-lora")),
        ]
        errors = [await refusal_of(call) for call in calls]
    assert {error.code for error in errors} == {grpc.StatusCode.UNIMPLEMENTED}
    assert {error.reason for error in errors} == {"NOT_SUPPORTED"}
    assert [error.metadata["method"] for error in errors] == [
        "WarmAdapter",
        "PinAdapter",
        "UnpinAdapter",
    ]


async def test_health_follows_the_links_phase(text: ModelText) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    async with running_frontend(text, FakeCoreLink(phase=LinkPhase.STARTING)) as frontend:
        stub = health_pb2_grpc.HealthStub(frontend.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=ENGINE))
        seen = [(await watch.read()).status]
        for phase in (LinkPhase.SERVING, LinkPhase.DRAINING):
            frontend.link.router.set_phase(phase)
            seen.append((await watch.read()).status)
        whole = await stub.Check(health_pb2.HealthCheckRequest())
        watch.cancel()
    assert seen == [not_serving, serving, not_serving]
    assert whole.status == not_serving


async def test_reflection_lists_and_describes_the_services(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        stub = reflection_pb2_grpc.ServerReflectionStub(frontend.channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=ENGINE),
        ]
        listed, described = [
            answer async for answer in stub.ServerReflectionInfo(iter(requests), timeout=10)
        ]
    names = {service.name for service in listed.list_services_response.service}
    assert {ENGINE, "grpc.health.v1.Health"} <= names
    files = described.file_descriptor_response.file_descriptor_proto
    services = [s.name for file in files for s in FileDescriptorProto.FromString(file).service]
    assert services == ["Engine"]


async def test_two_tenants_at_once_are_refused(text: ModelText) -> None:
    request = engine_pb2.GenerateRequest(model=BASE, prompt="x")
    key = "x-loraplex-tenant"
    async with running_frontend(text) as frontend:
        call = frontend.stub.Generate(request, metadata=((key, "one"), (key, "two")))
        error = await error_of(call)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert error.metadata["value"] == "['one', 'two']"


@pytest.mark.parametrize("tenant", ["", "UPPER", "a b", "-x", "x" * 129, "a/b"])
async def test_a_tenant_that_is_no_name_is_refused(tenant: str, text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        error = await frontend.refusal(prompt="x", tenant=tenant)
    assert error.reason == "NAME_INVALID"
    assert error.metadata["field"] == "metadata x-loraplex-tenant"


async def test_a_salt_never_leaves_its_tenant(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        await frontend.answer(prompt="x", tenant="one")
        await frontend.answer(prompt="x", tenant="one", cache_salt="two")
        await frontend.answer(prompt="x", tenant="two")
        salts = [request.cache_salt for request in frontend.link.requests]
    assert salts == ["one", "one/two", "two"]


async def test_every_request_leaves_one_record_and_one_wide_line(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        await frontend.answer(model="sql-lora", prompt="top secret words", request_id="r-1")
        await frontend.refusal(model="nobody", prompt="top secret words")
    done, refused = frontend.observer.records
    assert (done.request_id, done.model, done.outcome) == ("r-1", "sql-lora", "OK")
    assert (done.prompt_tokens, done.completion_tokens) == (3, 3)
    assert done.stats.waits.queue_s == 0.5
    assert done.ttft_s is not None
    assert done.tpot_s is not None
    assert (refused.model, refused.outcome, refused.reason) == ("", "NOT_FOUND", "MODEL_NOT_FOUND")
    first, second = [line for line in frontend.log_lines if line["event"] == "request.ended"]
    assert first["wait_place_s"] == first["wait_load_s"] == 0.25
    assert first["adapter_digest"] == "sha256:sql-lora-1"
    assert second["outcome"] == "NOT_FOUND"
    assert "secret" not in frontend.log.getvalue()


async def test_a_taken_port_is_named(text: ModelText) -> None:
    from engine_svc.frontend.server import FrontendOptions, build_server
    from engine_svc.log import Log

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OSError, match=address):
            build_server(
                FrontendOptions(address, BASE),
                link=FakeCoreLink(),
                names=name_map(),
                text=text,
                log=Log("frontend"),
            )
