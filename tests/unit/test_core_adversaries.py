"""Clients that try to get more than their part, or to make others wait: DESIGN §8 under attack.

The world's watch checks the bound of every wait for a place after every step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_svc.core.limits import turn_steps
from engine_svc.types import AdapterRef, FlowKey, ServiceClass
from tests.support.core_invariants import WaitWatch
from tests.support.core_world import Heard, World, adapter, limits

AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


def busy_world(**changes: object) -> World:
    """Room for everybody's KV, so that only places, seats and tokens are short."""
    values: dict[str, object] = {"num_pages": 2000, "num_slots": 6, "max_num_seqs": 6,
                                 "max_num_batched_tokens": 24, "quantum": 24}  # fmt: skip
    world = World(limits(**{**values, **changes}))
    world.watch = WaitWatch()
    return world


class Client:
    """Keeps so many requests of one flow alive."""

    def __init__(
        self, world: World, ref: AdapterRef | None, *, depth: int = 3, prompt: int = 4,
        max_tokens: int = 20, tenant: str = "default",
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
    ) -> None:  # fmt: skip
        self.world, self.ref, self.depth, self.tenant = world, ref, depth, tenant
        self.prompt, self.max_tokens, self.service_class = prompt, max_tokens, service_class
        self.sent: list[Heard] = []

    @property
    def key(self) -> FlowKey:
        return FlowKey(self.service_class, self.tenant, self.ref.digest if self.ref else "")

    def act(self) -> None:
        living = sum(heard.ended is None for heard in self.sent)
        for _ in range(self.depth - living):
            self.sent.append(
                self.world.submit(
                    self.prompt, self.ref, max_tokens=self.max_tokens, tenant=self.tenant,
                    service_class=self.service_class,
                )
            )  # fmt: skip

    @property
    def service(self) -> float:
        """As it is charged: prompt tokens of what began, and two for each token that a step had as
        its input."""
        began = sum(self.prompt for heard in self.sent if heard.planned_s is not None)
        fed = sum(len(t) - 1 for heard in self.sent for t in heard.tokens.values())
        return began + 2.0 * fed


def live(world: World, clients: list[Client], steps: int) -> None:
    for _ in range(steps):
        for client in clients:
            client.act()
        world.step()


def jain(numbers: list[float]) -> float:
    return sum(numbers) ** 2 / (len(numbers) * sum(n * n for n in numbers))


@AHEAD
def test_an_adapter_that_never_stops_shares_the_one_place_with_another(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead)
    greedy = Client(world, adapter("a"), depth=6, max_tokens=50)
    modest = Client(world, adapter("b"), depth=6, max_tokens=50)
    live(world, [greedy, modest], 400)
    assert jain([greedy.service, modest.service]) > 0.99


@AHEAD
@pytest.mark.parametrize("max_loras", [1, 2, 4])
def test_one_adapter_more_than_places_with_equal_load_is_served_alike(
    run_ahead: int, max_loras: int
) -> None:
    world = busy_world(max_loras=max_loras, run_ahead=run_ahead)
    clients = [Client(world, adapter(str(i)), depth=6) for i in range(max_loras + 1)]
    live(world, clients, 500)
    assert jain([client.service for client in clients]) > 0.99


@AHEAD
def test_a_flood_of_one_token_requests_gets_no_more_than_its_part(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead)
    flood = Client(world, adapter("a"), depth=40, prompt=1, max_tokens=1)
    steady = Client(world, adapter("b"), depth=6)
    live(world, [flood, steady], 400)
    assert steady.service >= 0.9 * flood.service


@AHEAD
def test_a_flood_at_the_base_leaves_an_adapter_its_part(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead)
    flood = Client(world, None, depth=40)
    steady = Client(world, adapter("b"), depth=6)
    live(world, [flood, steady], 400)
    assert jain([flood.service, steady.service]) > 0.98


@AHEAD
def test_very_long_prompts_do_not_take_the_tokens_of_short_ones(run_ahead: int) -> None:
    world = busy_world(max_loras=2, run_ahead=run_ahead, context_tokens=400)
    long = Client(world, adapter("a"), depth=6, prompt=300, max_tokens=2)
    short = Client(world, adapter("b"), depth=6, prompt=4, max_tokens=20)
    live(world, [long, short], 400)
    # long prompts take the tokens that are left, and one seat of six at a time
    alone = busy_world(max_loras=2, run_ahead=run_ahead, context_tokens=400)
    undisturbed = Client(alone, adapter("b"), depth=6, prompt=4, max_tokens=20)
    live(alone, [undisturbed], 400)
    assert short.service >= 0.5 * undisturbed.service
    assert max(h.ended.stats.waits.queue_s for h in short.sent if h.ended) < 2.0


@AHEAD
def test_a_flow_that_holds_every_seat_gives_some_to_who_comes(run_ahead: int) -> None:
    world = busy_world(max_loras=2, run_ahead=run_ahead)
    holder = Client(world, adapter("a"), depth=6, max_tokens=59)
    live(world, [holder], 20)
    late = world.submit(4, adapter("b"), max_tokens=2)
    live(world, [holder], turn_steps(world.limits) + 2)
    assert late.planned_s is not None


@AHEAD
def test_a_tenant_with_fifty_adapters_gets_one_tenants_part(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead, max_wanted=64, quantum=96)
    many = [Client(world, adapter(f"m{i}"), depth=6, tenant="many") for i in range(50)]
    one = Client(world, adapter("one"), depth=6, tenant="one")
    live(world, [*many, one], 600)
    assert one.service >= 0.8 * sum(client.service for client in many)


def test_a_tenant_with_a_thousand_adapters_holds_up_nobody() -> None:
    world = busy_world(max_loras=2)
    for number in range(1000):
        world.submit(2, adapter(f"m{number}"), max_tokens=2, tenant="many")
    late = world.submit(4, adapter("one"), max_tokens=2, tenant="one")
    for _ in range(2 * turn_steps(world.limits)):
        world.step()
    assert late.planned_s is not None


@AHEAD
def test_fresh_names_do_not_push_out_who_stays(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead, max_wanted=64)
    steady = Client(world, adapter("steady"), depth=6, tenant="steady")
    for number in range(400):
        world.submit(4, adapter(f"fresh{number}"), max_tokens=20, tenant="fresh")
        live(world, [steady], 1)
    fresh = sum(
        4 + 2 * len(h.tokens.get(0, ()))
        for h in world.heard.values()
        if h.request.flow.tenant == "fresh" and h.planned_s is not None
    )
    assert steady.service >= 0.7 * fresh


def test_who_leaves_ahead_of_the_others_comes_back_ahead() -> None:
    world = busy_world(max_loras=2)
    steady = Client(world, adapter("b"), tenant="steady")
    greedy = Client(world, adapter("a"), depth=6, tenant="greedy")
    live(world, [greedy, steady], 60)
    ledger = world.core._books.ledger
    before = ledger.flow(greedy.key, 1.0).parent
    assert before is not None
    counter = before.counter
    for heard in greedy.sent:
        if heard.ended is None:
            world.cancel(heard.request.request_id)
    live(world, [steady], 2)
    greedy.act()
    after = ledger.flow(greedy.key, 1.0).parent
    assert after is not None
    assert after.counter >= counter


@AHEAD
def test_an_idle_client_banks_no_credit(run_ahead: int) -> None:
    world = busy_world(max_loras=2, run_ahead=run_ahead)
    steady = Client(world, adapter("a"), depth=8, tenant="steady")
    on_off = Client(world, adapter("b"), depth=8, tenant="on-off")
    live(world, [steady, on_off], 20)
    live(world, [steady], 300)
    before = steady.service, on_off.service
    live(world, [steady, on_off], 400)
    gained = steady.service - before[0], on_off.service - before[1]
    assert jain(list(gained)) > 0.99


@AHEAD
@pytest.mark.parametrize("weights", [(1.0, 2.0, 4.0), (1.0, 100.0)])
def test_service_follows_the_weights_of_tenants(run_ahead: int, weights: tuple[float, ...]) -> None:
    world = busy_world(max_loras=3, run_ahead=run_ahead, turn_max_steps=400)
    world.core.set_shares({f"t{i}": weight for i, weight in enumerate(weights)}, {})
    clients = [
        Client(world, adapter("shared"), depth=12, tenant=f"t{i}") for i in range(len(weights))
    ]
    live(world, clients, 800)
    parts = [client.service / weight for client, weight in zip(clients, weights, strict=True)]
    # whatever its weight, a flow starts one request of 42 when it has waited for half a turn
    assert max(parts) - min(parts) <= 0.15 * max(parts) + 42.0 * (1 + 800 // 200)


@AHEAD
def test_weights_of_adapters_divide_only_their_tenants_part(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead, turn_max_steps=60, quantum=120)
    world.core.set_shares({}, {"sha256:heavy": 3.0})
    heavy = Client(world, adapter("heavy"), depth=12, tenant="two")
    light = Client(world, adapter("light"), depth=12, tenant="two")
    other = Client(world, adapter("other"), depth=12, tenant="one")
    live(world, [heavy, light, other], 400)
    assert jain([heavy.service + light.service, other.service]) > 0.98
    assert 2.0 < heavy.service / light.service < 4.0


@AHEAD
def test_a_flow_that_cancels_all_it_sends_delays_nobody(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead)
    steady = Client(world, adapter("a"), depth=6)
    for _ in range(300):
        pest = world.submit(10, adapter("pest"), max_tokens=20)
        live(world, [steady], 1)
        world.cancel(pest.request.request_id)
    assert sum(h.ended is not None for h in steady.sent) > 20
    assert world.core._books.ledger.num_flows <= 2


def _slow(world: World) -> None:
    world.weights.delay = lambda: 3000


def _failing(world: World) -> None:
    world.weights.failing = {"sha256:bad"}


@AHEAD
@pytest.mark.parametrize("spoil", [_slow, _failing])
def test_adapters_whose_load_is_slow_or_fails_hold_no_place(
    run_ahead: int, spoil: Callable[[World], None]
) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead)
    good = [Client(world, adapter("a"), depth=6), Client(world, adapter("b"), depth=6)]
    live(world, good, 5)
    spoil(world)
    bad = Client(world, adapter("bad"))
    live(world, [*good, bad], 400)
    assert jain([client.service for client in good]) > 0.98
    assert not any(heard.tokens for heard in bad.sent)


def test_adapters_too_big_beside_kv_still_all_come_to_their_end() -> None:
    world = World(limits(max_loras=2, num_pages=26), adapter_pages=10)
    heard = [world.submit(10, adapter(name), max_tokens=12) for name in "abcdabcd"]
    world.run()
    assert all(h.ended and h.ended.failure is None for h in heard)


def test_weights_that_change_mid_run_hold_from_then_on() -> None:
    world = busy_world(max_loras=2)
    clients = [Client(world, adapter("shared"), depth=12, tenant=t) for t in "ab"]
    live(world, clients, 300)
    before = [client.service for client in clients]
    assert jain(before) > 0.99
    world.core.set_shares({"a": 3.0}, {})
    live(world, clients, 600)
    gained = [client.service - was for client, was in zip(clients, before, strict=True)]
    assert 2.5 < gained[0] / gained[1] < 3.5


@AHEAD
def test_a_drain_during_a_backlog_serves_everybody_in_line(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead)
    for number in range(30):
        world.submit(4, adapter("abcde"[number % 5]), max_tokens=10)
    world.core.drain()
    world.run()
    assert all(h.ended and h.ended.failure is None for h in world.heard.values())


@AHEAD
def test_batch_gets_its_part_of_the_grants_and_no_more(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead, batch_grant_every=4)
    interactive = [Client(world, adapter(f"i{i}"), depth=6) for i in range(3)]
    batch = [
        Client(world, adapter(f"b{i}"), depth=6, service_class=ServiceClass.BATCH) for i in range(3)
    ]
    live(world, interactive + batch, 700)
    served = [sum(c.service for c in group) for group in (interactive, batch)]
    assert 2.5 < served[0] / served[1] < 3.5
