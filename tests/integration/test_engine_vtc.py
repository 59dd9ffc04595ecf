"""The workloads of VTC's paper, scaled down: two clients of unlike demand, and one that comes and
goes. Source: Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), section 5.

The clients are tenants of the base model, who ask for far more than the engine can do: as 1.5 and 3
requests a second, one asks twice as often as the other. Service is what the engine counts for them
between two looks at which both had requests that waited, so no other work on the machine matters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from loraplex.engine.v1 import engine_pb2
from tests.support.engine_stack import Stack
from tests.support.tiny_model import TINY_NAME
from tests.support.waiting import eventually

LIGHT, HEAVY = "light", "heavy"
SEATS = 4
PROMPT, MAX_TOKENS = "once upon", 32
#: a prompt token costs 1 and a generated one 2; the tiny model's tokens are bytes
REQUEST_SERVICE = len(PROMPT) + 2 * MAX_TOKENS
#: who is served is decided request by request, and no more of them run than there are seats
MAX_GAP = SEATS * REQUEST_SERVICE
#: so much for each that a gap of MAX_GAP is an eighth
WINDOW_SERVICE = 8 * MAX_GAP
LIGHT_REQUESTS = 2 * WINDOW_SERVICE // REQUEST_SERVICE


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("vtc")) as stack:
        stack.start_registry()
        stack.add_base_model()
        stack.start_engine(
            "--max-num-seqs", str(SEATS), "--max-num-batched-tokens", "32",
            "--max-queue-wait", "600",
        )  # fmt: skip
        yield stack


class Backlog:
    """Requests that were sent at once; leaving the context cancels what was not answered."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._tenants: set[str] = set()
        self._calls: list[Iterator[engine_pb2.GenerateResponse]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Backlog:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def send(self, *tenants: str) -> None:
        """One request of each, in this order."""
        self._tenants.update(tenants)
        for tenant in tenants:
            call = self._stack.stream(TINY_NAME, PROMPT, MAX_TOKENS, tenant)
            reader = threading.Thread(target=_read, args=(call,))
            reader.start()
            self._calls.append(call)
            self._readers.append(reader)

    def cancel(self) -> None:
        for call in self._calls:
            call.cancel()  # type: ignore[attr-defined]
        for reader in self._readers:
            reader.join(60)
        self._calls.clear()
        self._readers.clear()
        eventually(lambda: not self._tenants & flows_of(self._stack.state()).keys())


def _read(call: Iterator[engine_pb2.GenerateResponse]) -> None:
    try:
        for _ in call:
            pass
    except Exception:  # a cancelled call; the engine's own count says what was served
        return


def flows_of(state: engine_pb2.EngineState) -> dict[str, engine_pb2.FlowState]:
    return {flow.tenant: flow for flow in state.flows}


def both_wait(state: engine_pb2.EngineState) -> bool:
    flows = flows_of(state)
    return all(tenant in flows and flows[tenant].waiting for tenant in (LIGHT, HEAVY))


def service_while_both_wait(stack: Stack, enough: float = WINDOW_SERVICE) -> tuple[float, float]:
    """Service of the light and of the heavy one from now on, until the lesser has had `enough`."""
    before = flows_of(eventually(lambda: (state := stack.state()) and both_wait(state) and state))

    def gained() -> tuple[float, float] | None:
        state = stack.state()
        assert both_wait(state), "somebody's backlog ended before the window did"
        now = flows_of(state)
        light, heavy = (
            now[tenant].virtual_counter - before[tenant].virtual_counter
            for tenant in (LIGHT, HEAVY)
        )
        return (light, heavy) if min(light, heavy) >= enough else None

    return eventually(gained, 120)


def test_two_backlogged_clients_are_served_alike_though_one_asks_twice_as_often(
    stack: Stack,
) -> None:
    with Backlog(stack) as backlog:
        backlog.send(*(LIGHT, HEAVY, HEAVY) * LIGHT_REQUESTS)
        light, heavy = service_while_both_wait(stack)
    assert abs(light - heavy) <= MAX_GAP, (light, heavy)


def test_weights_share_the_engine_as_they_say(stack: Stack) -> None:
    stack.registryctl("tenant", "update", LIGHT, "--weight", "3")
    try:
        with Backlog(stack) as backlog:
            backlog.send(*(LIGHT, LIGHT, HEAVY) * LIGHT_REQUESTS)
            eventually(lambda: {f.tenant_weight for f in stack.state().flows} == {1.0, 3.0})
            light, heavy = service_while_both_wait(stack, WINDOW_SERVICE / 3)
    finally:
        stack.registryctl("tenant", "update", LIGHT, "--weight", "1")
    assert abs(light / 3 - heavy) <= MAX_GAP / 3, (light, heavy)


def test_who_comes_back_has_banked_nothing_and_owes_nothing(stack: Stack) -> None:
    with Backlog(stack) as steady, Backlog(stack) as comes_and_goes:
        steady.send(*(HEAVY,) * LIGHT_REQUESTS)
        eventually(lambda: flows_of(stack.state())[HEAVY].virtual_counter >= WINDOW_SERVICE / 2)
        for _ in range(2):
            steady.send(*(HEAVY,) * LIGHT_REQUESTS)
            comes_and_goes.send(*(LIGHT,) * LIGHT_REQUESTS)
            light, heavy = service_while_both_wait(stack, WINDOW_SERVICE / 2)
            assert abs(light - heavy) <= MAX_GAP, (light, heavy)
            comes_and_goes.cancel()
