"""Shares and bounded waits on running processes: 12 adapters, two places, more demand than places.

A saturating crowd: every adapter has clients that ask again as soon as they are answered.
"""

from __future__ import annotations

import time
import urllib.request
from collections import Counter
from collections.abc import Iterator

import grpc
import pytest

from engine_svc.cli.main import main as enginectl
from loraplex.engine.v1 import engine_pb2
from loraplex.status import from_rpc_error
from tests.support.crowd import crowd
from tests.support.engine_stack import Stack, error_of
from tests.support.waiting import eventually

ADAPTERS = tuple(f"a{index:02}" for index in range(12))
TURN_MAX_STEPS, CLOSING_STEPS = 24, 4
#: what the core adds for a swap between two adapters of a place, on a CPU (no run-ahead)
SWAP_STEPS = 2
MAX_LORAS = 2
BOUND_STEPS = -(-len(ADAPTERS) // MAX_LORAS) * (TURN_MAX_STEPS + CLOSING_STEPS + SWAP_STEPS)
ENGINE_ARGS = (
    "--max-loras", str(MAX_LORAS), "--max-num-seqs", "8", "--max-num-batched-tokens", "32",
    "--quantum", "auto", "--turn-max-steps", str(TURN_MAX_STEPS),
    "--closing-steps", str(CLOSING_STEPS), "--max-queue-wait", "600",
)  # fmt: skip


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("fairness")) as stack:
        stack.start_registry()
        stack.add_base_model()
        for seed, name in enumerate(ADAPTERS, start=1):
            stack.publish(name, seed)
        stack.start_engine(*ENGINE_ARGS)
        yield stack


def test_twelve_adapters_on_two_places_all_wait_less_than_their_bound(stack: Stack) -> None:
    longest: Counter[str] = Counter()
    step_s = 0.0
    with crowd(stack) as people:
        for name in ADAPTERS:
            people.start(name, clients=2)
        eventually(lambda: len(people.answers) == len(ADAPTERS), 60)
        deadline = time.monotonic() + 4.0
        while time.monotonic() < deadline:
            state = stack.state()
            assert sum(one.holds_place for one in state.residency) <= MAX_LORAS
            step_s = max(step_s, state.step_s)
            for flow in state.flows:
                longest[flow.adapter.name] = max(longest[flow.adapter.name], flow.waited_s)
    assert not people.errors
    assert set(longest) == set(ADAPTERS)
    bound_s = BOUND_STEPS * step_s
    assert max(longest.values()) <= bound_s, (longest.most_common(3), bound_s)
    # equal weights and equal demand: nobody has twice what another has
    assert max(people.tokens.values()) <= 2 * min(people.tokens.values()), people.tokens


def test_without_turns_the_residents_keep_their_places_and_all_others_starve(
    stack: Stack,
) -> None:
    """The same engine with the field's policy: this is what turns prevent."""
    stack.stop_engine()
    stack.start_engine(*ENGINE_ARGS, "--policy", "resident-first")
    try:
        with crowd(stack) as people:
            for name in ADAPTERS[:MAX_LORAS]:
                # answers of unlike lengths: never do all of an adapter's end together
                for max_tokens in (97, 131, 173):
                    people.start(name, max_tokens=max_tokens)
            eventually(lambda: len(stack.state().turns) == MAX_LORAS)
            for name in ADAPTERS[MAX_LORAS:]:
                people.start(name)
            eventually(lambda: sum(people.answers.values()) >= 18, 60)
            assert set(people.answers) == set(ADAPTERS[:MAX_LORAS])
            waited = [f.waited_s for f in stack.state().flows if f.ring_position > 0]
            assert len(waited) == len(ADAPTERS) - MAX_LORAS
    finally:
        stack.stop_engine()
        stack.start_engine(*ENGINE_ARGS)
    assert not people.errors


def test_state_and_top_show_turns_ring_bounds_and_real_waits(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    with crowd(stack, max_tokens=64) as people:
        for name in ADAPTERS[:5]:
            people.start(name)

        def crowded() -> engine_pb2.EngineState | None:
            state = stack.state()
            ring = [flow for flow in state.flows if flow.ring_position > 0]
            # whoever came just now may wait for the copy of its weights first
            is_settled = all(f.waits_for == engine_pb2.WAIT_CAUSE_PLACE for f in ring if f.waiting)
            crowd_is_there = len(ring) >= 2 and len(state.turns) == MAX_LORAS
            return state if crowd_is_there and is_settled else None

        state = eventually(crowded)
        assert enginectl(["top", "--once", "--address", stack.engine_address]) == 0
    ring = sorted(flow.ring_position for flow in state.flows if flow.ring_position > 0)
    assert ring == list(range(1, len(ring) + 1))
    for flow in state.flows:
        assert (flow.wait_bound_s > 0) == (flow.ring_position > 0)
    assert all(turn.quantum > 0 and turn.max_steps == TURN_MAX_STEPS for turn in state.turns)
    shown = capsys.readouterr().out
    assert "places 2/2" in shown
    assert "bound s" in shown
    assert "\x1b" not in shown


def test_explain_says_what_a_waiting_request_lacks_and_forgets_it_at_its_end(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    def explain() -> str:
        enginectl(["explain", "mine", "--address", stack.engine_address])
        return capsys.readouterr().out

    with crowd(stack, max_tokens=64) as people:
        for name in ADAPTERS[:4]:
            people.start(name, clients=2)
        eventually(lambda: len(stack.state().turns) == MAX_LORAS)
        call = stack.stub.Generate(
            engine_pb2.GenerateRequest(
                model=ADAPTERS[7], prompt="x", request_id="mine",
                sampling=engine_pb2.SamplingParams(max_tokens=400, ignore_eos=True),
            )
        )  # fmt: skip
        text = eventually(explain)
        assert f"request mine of tenant default for {ADAPTERS[7]}" in text
        # first its weights arrive; its tenant's ring is shown all the while
        eventually(lambda: "in the ring for 2 places" in explain())
        call.cancel()
    eventually(lambda: not stack.state().flows)
    assert enginectl(["explain", "mine", "--address", stack.engine_address]) == 3
    assert "REQUEST_NOT_FOUND" in capsys.readouterr().err


def test_weights_and_limits_of_the_registry_reach_the_running_engine(stack: Stack) -> None:
    with crowd(stack) as people:
        for name in ADAPTERS[:3]:
            people.start(name)
        stack.registryctl("update", ADAPTERS[0], "--weight", "4")
        stack.registryctl("tenant", "update", "default", "--weight", "2")

        def weights() -> dict[str, tuple[float, float]]:
            return {
                flow.adapter.name: (flow.tenant_weight, flow.adapter_weight)
                for flow in stack.state().flows
            }

        eventually(lambda: weights().get(ADAPTERS[0]) == (2.0, 4.0))
        eventually(lambda: weights().get(ADAPTERS[1]) == (2.0, 1.0))
        stack.registryctl("tenant", "update", "default", "--max-queued-tokens", "4")
        error = eventually(lambda: _refused(stack))
    try:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        refused = from_rpc_error(error)
        assert refused.reason == "TENANT_QUOTA"
        assert refused.retry_after_s is not None
        assert refused.metadata["limit"] == "4"
    finally:
        stack.registryctl(
            "tenant", "update", "default", "--max-queued-tokens", "0", "--weight", "1"
        )
        stack.registryctl("update", ADAPTERS[0], "--weight", "1")
    eventually(lambda: not _refused(stack))


def test_a_request_that_cannot_make_its_deadline_is_refused_at_once(stack: Stack) -> None:
    with crowd(stack, max_tokens=64) as people:
        for name in ADAPTERS[:8]:
            people.start(name, clients=2)
        eventually(lambda: stack.state().step_s > 0 and len(people.answers) >= 4, 60)

        def refused() -> grpc.RpcError | None:
            began = time.monotonic()
            error = error_of(stack.stream(ADAPTERS[11], timeout_s=0.05, max_tokens=4))
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                return None
            assert time.monotonic() - began < 0.05
            return error

        found = from_rpc_error(eventually(refused))
    assert found.reason == "WAIT_EXCEEDS_DEADLINE"
    assert found.retry_after_s is not None
    assert found.retry_after_s > 0


def test_metrics_show_waits_bounds_and_lags_by_adapter(stack: Stack) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with crowd(stack, max_tokens=64) as people:
        for name in ADAPTERS[:5]:
            people.start(name)

        def scrape() -> str:
            with opener.open(f"http://{stack.metrics_address}/metrics", timeout=5) as answer:
                text: str = answer.read().decode()
            return text

        for series in (
            'loraplex_flow_wait_bound_seconds{adapter="a00"}',
            'loraplex_flow_service_lag{adapter="a00"}',
            'loraplex_flow_wait_seconds{adapter="a00"}',
            'loraplex_step_deferred_sequences_total{reason="place"}',
        ):
            assert eventually(lambda name=series: name in scrape()), series


def _refused(stack: Stack) -> grpc.RpcError | None:
    try:
        stack.generate(ADAPTERS[5], prompt="many tokens " * 4, max_tokens=1)
    except grpc.RpcError as error:
        return error
    return None
