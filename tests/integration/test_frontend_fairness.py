"""What a client hears of shares, waits and turns, over a real socket and a fake core."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_svc.frontend.text.model_text import ModelText
from engine_svc.snapshots import (
    CoreSnapshot,
    FlowSnapshot,
    RequestExplanation,
    TenantSnapshot,
    TurnSnapshot,
)
from engine_svc.types import Failure, FlowKey, Request, ServiceClass, Waits
from loraplex.engine.v1 import engine_pb2
from loraplex.status import LoraplexError, from_rpc_error
from tests.support.fake_core_link import FakeCoreLink, Step, ended
from tests.support.frontend_server import adapter, running_frontend


@pytest.fixture(scope="module")
def text(demo_model_dir: Path) -> ModelText:
    return ModelText.load(demo_model_dir)


async def refusal_of(call: Any) -> LoraplexError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_engine_state_shows_turns_counters_bounds_and_causes(text: ModelText) -> None:
    ref = adapter("sql-lora")
    flow = FlowSnapshot(
        FlowKey(ServiceClass.INTERACTIVE, "one", ref.digest), ref, waiting=5, ring_position=3,
        waited_s=0.5, virtual_counter=12.5, wait_bound_s=4.0, waits_for="place", tenant_weight=2.0,
        adapter_weight=4.0, service_lag=-3.0,
    )  # fmt: skip
    state = CoreSnapshot(
        flows=(flow,), turns=(TurnSnapshot(None, 30.0, 512.0, 4, 64, True),), step_s=0.25
    )
    async with running_frontend(text, FakeCoreLink(state=state)) as frontend:
        answer = await frontend.stub.GetEngineState(engine_pb2.GetEngineStateRequest())
    (shown,), (turn,) = answer.state.flows, answer.state.turns
    assert (shown.virtual_counter, shown.wait_bound_s, shown.waited_s) == (12.5, 4.0, 0.5)
    assert (shown.tenant_weight, shown.adapter_weight, shown.service_lag) == (2.0, 4.0, -3.0)
    assert shown.waits_for == engine_pb2.WAIT_CAUSE_PLACE
    assert (turn.adapter.name, turn.service, turn.quantum) == ("", 30.0, 512.0)
    assert (turn.steps, turn.max_steps, turn.closing) == (4, 64, True)
    assert answer.state.step_s == 0.25


async def test_explain_says_why_an_open_request_waits(text: ModelText) -> None:
    ref = adapter("sql-lora")
    flow = FlowSnapshot(FlowKey(ServiceClass.BATCH, "one", ref.digest), ref, ring_position=2)
    link = FakeCoreLink()
    link.explanations["mine"] = RequestExplanation(
        "mine", "paused", flow, "pages", ahead=1, waits=Waits(place_s=0.5, kv_s=0.25),
        paused_s=2.0, prompt_tokens=3, completion_tokens=4, demanding_adapters=9, max_loras=2,
        tenant=TenantSnapshot(ServiceClass.BATCH, "one", 3, 4, 5, 2.0, 9.0, -1.0, 6.0),
        service=11.0, predicted_wait_s=1.5,
    )  # fmt: skip
    async with running_frontend(text, link) as frontend:
        shown = await frontend.stub.Explain(engine_pb2.ExplainRequest(request_id="mine"))
        unknown = await refusal_of(
            frontend.stub.Explain(engine_pb2.ExplainRequest(request_id="gone"))
        )
        foreign = await refusal_of(
            frontend.stub.Explain(
                engine_pb2.ExplainRequest(request_id="mine"),
                metadata=(("x-loraplex-tenant", "stranger"),),
            )
        )
        empty = await refusal_of(frontend.stub.Explain(engine_pb2.ExplainRequest()))
    assert (shown.request_id, shown.state) == ("mine", engine_pb2.REQUEST_STATE_PAUSED)
    assert shown.waits_for == engine_pb2.WAIT_CAUSE_PAGES
    assert shown.flow.service_class == engine_pb2.SERVICE_CLASS_BATCH
    assert (shown.flow.ring_position, shown.ahead) == (2, 1)
    assert (shown.wait_place_s, shown.wait_kv_s, shown.paused_s) == (0.5, 0.25, 2.0)
    assert (shown.prompt_tokens, shown.completion_tokens) == (3, 4)
    assert (shown.demanding_adapters, shown.max_loras) == (9, 2)
    assert (shown.service, shown.predicted_wait_s) == (11.0, 1.5)
    tenant = shown.tenant
    assert (tenant.tenant, tenant.service_class) == ("one", engine_pb2.SERVICE_CLASS_BATCH)
    assert (tenant.ring_position, tenant.ring_flows, tenant.flows, tenant.weight) == (3, 4, 5, 2.0)
    assert (tenant.virtual_counter, tenant.service_lag, tenant.debt) == (9.0, -1.0, 6.0)
    assert (unknown.reason, empty.reason) == ("REQUEST_NOT_FOUND", "FIELD_INVALID")
    assert foreign.reason == "REQUEST_NOT_FOUND"


async def test_the_class_and_the_clients_id_reach_the_core(text: ModelText) -> None:
    link = FakeCoreLink()
    async with running_frontend(text, link) as frontend:
        await frontend.answer(
            model="sql-lora", prompt="x", request_id="mine",
            service_class=engine_pb2.SERVICE_CLASS_BATCH,
        )  # fmt: skip
        await frontend.answer(model="sql-lora", prompt="x")
    first, second = link.requests
    assert (first.client_request_id, first.flow.service_class) == ("mine", ServiceClass.BATCH)
    assert second.client_request_id == second.request_id
    assert second.flow.service_class is ServiceClass.INTERACTIVE


async def test_a_refusal_for_its_wait_tells_the_client_when_to_come_back(text: ModelText) -> None:
    refused = Failure(
        "RESOURCE_EXHAUSTED", "WAIT_EXCEEDS_DEADLINE", "the wait would be 42.0 s",
        (("wait_s", "42.0"), ("limit_s", "30.0")), 12.0,
    )  # fmt: skip

    def refuse(request: Request) -> Iterator[Step]:
        yield (ended(request, failure=refused),)

    async with running_frontend(text, FakeCoreLink(refuse)) as frontend:
        error = await frontend.refusal(model="sql-lora", prompt="x")
    assert (error.reason, error.retry_after_s) == ("WAIT_EXCEEDS_DEADLINE", 12.0)
    assert error.metadata == {"wait_s": "42.0", "limit_s": "30.0"}
