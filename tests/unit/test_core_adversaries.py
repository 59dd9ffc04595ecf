"""Clients that try to get more than their part, or to make others wait: DESIGN §8 under attack.

The world's watch checks the bound of every wait for a place after every step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_svc.core.limits import longest_turn
from engine_svc.types import ServiceClass
from tests.support.core_clients import Client, jain, live
from tests.support.core_invariants import WaitWatch
from tests.support.core_world import World, adapter, limits

AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


def busy_world(**changes: object) -> World:
    """Room for everybody's KV, so that only places, seats and tokens are short."""
    values: dict[str, object] = {"num_pages": 2000, "num_slots": 6, "max_num_seqs": 6,
                                 "max_num_batched_tokens": 24, "quantum": 24}  # fmt: skip
    world = World(limits(**{**values, **changes}))
    world.watch = WaitWatch()
    return world


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
    long = Client(world, adapter("a"), depth=12, prompt=300, max_tokens=2)
    short = Client(world, adapter("b"), depth=12, prompt=4, max_tokens=20)
    live(world, [long, short], 400)
    alone = busy_world(max_loras=2, run_ahead=run_ahead, context_tokens=400)
    undisturbed = Client(alone, adapter("b"), depth=12, prompt=4, max_tokens=20)
    live(alone, [undisturbed], 400)
    # one seat of six goes to a long prompt
    assert short.service >= 0.8 * undisturbed.service
    assert long.service >= short.service
    assert max(h.ended.stats.waits.queue_s for h in short.sent if h.ended) < 2.0


@AHEAD
def test_a_flow_that_holds_every_seat_gives_some_to_who_comes(run_ahead: int) -> None:
    world = busy_world(max_loras=2, run_ahead=run_ahead)
    holder = Client(world, adapter("a"), depth=6, max_tokens=59)
    live(world, [holder], 20)
    late = world.submit(4, adapter("b"), max_tokens=2)
    live(world, [holder], longest_turn(world.limits) + 2)
    assert late.planned_s is not None


@AHEAD
@pytest.mark.parametrize(("max_loras", "num_adapters"), [(1, 50), (4, 50), (6, 8), (12, 8)])
def test_a_tenant_with_many_adapters_gets_one_tenants_part(
    run_ahead: int, max_loras: int, num_adapters: int
) -> None:
    """Also where all adapters have places, and only seats are short."""
    world = busy_world(
        max_loras=max_loras, num_slots=max_loras + 2, run_ahead=run_ahead, max_wanted=64,
        quantum=96, turn_max_steps=10_000,
    )  # fmt: skip
    many = [Client(world, adapter(f"m{i}"), depth=12, tenant="many") for i in range(num_adapters)]
    one = Client(world, adapter("one"), depth=12, tenant="one")
    live(world, [*many, one], 500)
    assert jain([one.service, sum(client.service for client in many)]) > 0.99


@AHEAD
def test_who_rides_in_the_turn_of_a_light_flow_does_not_keep_its_place(run_ahead: int) -> None:
    """The turn of who is behind goes on, but not for others of its adapter once it has ended."""
    world = busy_world(max_loras=1, run_ahead=run_ahead, turn_max_steps=10_000)
    waiting = Client(world, adapter("x"), depth=6, tenant="big")
    live(world, [waiting], 60)
    light = world.submit(4, adapter("a"), max_tokens=2, tenant="light")
    rider = Client(world, adapter("a"), depth=6, tenant="big")
    live(world, [waiting, rider], 30)
    assert light.ended is not None
    before = waiting.service
    live(world, [waiting, rider], 200)
    assert jain([waiting.service - before, rider.service]) > 0.9


def test_a_tenant_with_a_thousand_adapters_holds_up_nobody() -> None:
    world = busy_world(max_loras=2)
    for number in range(1000):
        world.submit(2, adapter(f"m{number}"), max_tokens=2, tenant="many")
    late = world.submit(4, adapter("one"), max_tokens=2, tenant="one")
    for _ in range(2 * longest_turn(world.limits)):
        world.step()
    assert late.planned_s is not None


@AHEAD
def test_fresh_names_do_not_push_out_who_stays(run_ahead: int) -> None:
    world = busy_world(max_loras=1, run_ahead=run_ahead, max_wanted=64)
    steady = Client(world, adapter("steady"), depth=12, tenant="steady")
    for number in range(400):
        world.submit(4, adapter(f"fresh{number}"), max_tokens=20, tenant="fresh")
        live(world, [steady], 1)
    total = world.charges.total.items()
    fresh = sum(service for key, service in total if key.tenant == "fresh")
    assert jain([steady.service, fresh]) > 0.99


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
    parts = _parts_by_weight(run_ahead, weights, turn_max_steps=4000)
    # of 42 each is a request: who is served next is settled when one begins
    assert max(parts) - min(parts) <= 0.05 * max(parts) + 42.0


@AHEAD
@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize(
    ("turn_steps", "depth", "unit"), [(0, 7, 1.0), (10, 4, 1.0), (10, 4, 50.0)]
)
def test_service_follows_weights_where_steps_end_turns(
    run_ahead: int, max_loras: int, turn_steps: int, depth: int, unit: float
) -> None:
    """As by default, where the quantum is more than short turns can use."""
    world = busy_world(
        max_loras=max_loras, run_ahead=run_ahead, turn_steps=turn_steps, turn_max_steps=60,
        quantum=10**5, max_queue_wait_s=1e9,
    )  # fmt: skip
    world.core.set_shares({"light": unit, "heavy": 4.0 * unit}, {})
    light, heavy = (
        [Client(world, adapter(f"{tenant}{n}"), depth=depth, tenant=tenant) for n in range(3)]
        for tenant in ("light", "heavy")
    )
    live(world, [*light, *heavy], 600)
    ratio = sum(client.service for client in heavy) / sum(client.service for client in light)
    # turn_max_steps alone leaves heavy turns no room to be longer, only light ones to be shorter
    assert (3.7 if turn_steps else 2.2) < ratio < 4.3


@AHEAD
def test_a_light_tenant_waits_no_longer_for_its_weight(run_ahead: int) -> None:
    """The bound of waits holds whatever the weights: one request each half turn, here 42 in 200
    steps, where one part in 101 of the engine is 25."""
    light, heavy = _parts_by_weight(run_ahead, (1.0, 100.0), turn_max_steps=400)
    assert heavy < light <= 42.0 * (1 + 800 // 200)


def _parts_by_weight(
    run_ahead: int, weights: tuple[float, ...], turn_max_steps: int
) -> list[float]:
    """Service ÷ weight of tenants that share an adapter for 800 steps."""
    world = busy_world(max_loras=3, run_ahead=run_ahead, turn_max_steps=turn_max_steps)
    world.core.set_shares({f"t{i}": weight for i, weight in enumerate(weights)}, {})
    clients = [
        Client(world, adapter("shared"), depth=14, tenant=f"t{i}") for i in range(len(weights))
    ]
    live(world, clients, 800)
    return [client.service / weight for client, weight in zip(clients, weights, strict=True)]


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
@pytest.mark.parametrize(
    ("max_loras", "seats", "sizes"),
    [(1, 4, [(12, 1), (60, 1), (60, 1)]), (3, 1, [(2, 30), (12, 30)]), (4, 1, [(60, 8), (60, 1)])],
)
def test_unlike_requests_of_one_tenants_adapters_get_equal_service(
    run_ahead: int, max_loras: int, seats: int, sizes: list[tuple[int, int]]
) -> None:
    """Where a turn cannot be shorter than a step, whose service is more than a light quantum."""
    tokens = seats + 4
    world = busy_world(
        max_loras=max_loras, max_num_seqs=seats, max_num_batched_tokens=tokens, quantum=tokens,
        run_ahead=run_ahead, closing_steps=3, turn_max_steps=10_000, context_tokens=100,
    )  # fmt: skip
    world.core.set_shares({"one": 0.5}, {})
    unlike = [
        Client(world, adapter(str(i)), depth=2 * seats + 1, prompt=prompt, max_tokens=output,
               tenant="one")
        for i, (prompt, output) in enumerate(sizes)
    ]  # fmt: skip
    other = Client(world, adapter("other"), depth=2 * seats + 1, tenant="other")
    live(world, [*unlike, other], 800)
    services = [client.service for client in unlike]
    # at most a request apart
    assert max(services) - min(services) <= 120.0
    assert other.service == pytest.approx(2 * sum(services), rel=0.2)


@AHEAD
def test_a_turn_is_not_lost_while_the_last_tokens_of_others_hold_all_seats(run_ahead: int) -> None:
    """With run-ahead a step has nothing to plan while requests of one token are in flight."""
    world = busy_world(
        max_loras=2, max_num_seqs=2, max_num_batched_tokens=36, quantum=108, closing_steps=12,
        turn_max_steps=10_000, run_ahead=run_ahead, num_slots=16,
    )  # fmt: skip
    world.core.set_shares({"one": 0.5, "other": 0.5}, {})
    long = Client(world, adapter("long"), depth=5, prompt=2, max_tokens=30, tenant="one")
    short = Client(world, adapter("short"), depth=5, prompt=12, max_tokens=1, tenant="one")
    other = Client(world, adapter("other"), depth=5, prompt=2, max_tokens=1, tenant="other")
    live(world, [long, other, short], 1200)
    assert abs(long.service - short.service) <= 124.0


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
