"""Virtual counters and the ring by themselves."""

from __future__ import annotations

import pytest

from engine_svc.core.limits import check_limits, quantum_floor, resolved_quantum
from engine_svc.core.shares import Ledger, Share
from engine_svc.types import FlowKey, ServiceClass
from tests.support.core_world import World, adapter, limits

_I, _B = ServiceClass.INTERACTIVE, ServiceClass.BATCH


def flow(ledger: Ledger, tenant: str, digest: str = "", weight: float = 1.0) -> Share:
    share = ledger.flow(FlowKey(_I, tenant, digest), weight)
    share.wake()
    return share


def test_counters_grow_by_service_over_weight_on_every_level() -> None:
    ledger = Ledger(4)
    ledger.set_weights({"t": 2.0}, {"a": 5.0})
    share = flow(ledger, "t", "a")
    ledger.charge(share, 30.0)
    account = share.parent
    assert account is not None
    assert (share.counter, account.counter) == (6.0, 15.0)
    assert ledger.class_of(_I).counter == 10.0


def test_a_flow_that_wakes_is_lifted_to_virtual_time() -> None:
    ledger = Ledger(4)
    first = flow(ledger, "t", "a")
    second = flow(ledger, "t", "b")
    ledger.charge(first, 40.0)
    late = flow(ledger, "t", "c")
    assert late.counter == 20.0
    assert second.counter == 0.0


def test_a_flow_ahead_of_the_others_is_remembered_until_they_have_caught_up() -> None:
    ledger = Ledger(4)
    ahead, other = flow(ledger, "t", "a"), flow(ledger, "t", "b")
    ledger.charge(ahead, 40.0)
    ledger.release(ahead)
    assert flow(ledger, "t", "a") is ahead
    ledger.release(ahead)
    ledger.check_integrity()
    ledger.charge(other, 30.0)
    assert ledger.num_flows == 1
    assert flow(ledger, "t", "a") is not ahead


def test_a_flow_behind_the_others_is_forgotten_at_once() -> None:
    ledger = Ledger(4)
    behind, other = flow(ledger, "t", "a"), flow(ledger, "t", "b")
    ledger.charge(other, 40.0)
    ledger.release(behind)
    assert ledger.num_flows == 1


def test_nothing_is_remembered_when_everybody_has_left() -> None:
    ledger = Ledger(4)
    shares = [flow(ledger, tenant, "a") for tenant in "tuv"]
    ledger.charge(shares[0], 100.0)
    for share in shares:
        ledger.release(share)
    assert ledger.num_flows == 0


def ring_order(world: World) -> list[tuple[str, str]]:
    return [(f.key.tenant, f.key.digest[7:]) for f in world.core._books.ring]


def test_places_go_around_tenants_and_inside_a_tenant_first_come() -> None:
    world = World(limits(max_loras=1, max_wanted=16, num_pages=400, quantum=1000,
                         turn_max_steps=1000))  # fmt: skip
    world.submit(4, adapter("holder"), max_tokens=50, tenant="x")
    world.step()
    world.step()
    for tenant, name in (("t", "a"), ("t", "b"), ("t", "c"), ("u", "d"), ("u", "e"), ("v", "f")):
        world.submit(4, adapter(name), tenant=tenant)
    for _ in range(3):
        world.step()
    order = [("t", "a"), ("u", "d"), ("v", "f"), ("t", "b"), ("u", "e"), ("t", "c")]
    assert ring_order(world) == order
    ring = world.core._books.ring
    assert all(ring.num_before(f) >= place for place, f in enumerate(ring))
    world.run()


@pytest.mark.parametrize("every", [2, 4])
def test_one_grant_of_every_b_goes_to_batch(every: int) -> None:
    world = World(limits(max_loras=1, num_pages=400, quantum=1000, turn_max_steps=1000,
                         batch_grant_every=every))  # fmt: skip
    world.submit(4, adapter("holder"), max_tokens=50)
    world.step()
    world.step()
    for number in range(6):
        world.submit(4, adapter(f"b{number}"), service_class=_B)
        world.submit(4, adapter(f"i{number}"))
    for _ in range(3):
        world.step()
    classes = [name[0] for _, name in ring_order(world)]
    batch = [place for place, kind in enumerate(classes[: every * 2]) if kind == "b"]
    assert len(batch) == 2
    assert batch[1] - batch[0] == every
    ring = world.core._books.ring
    assert all(ring.num_before(f) >= place for place, f in enumerate(ring))
    world.run()


def test_the_quantum_is_computed_from_seats_and_places_and_never_below_its_floor() -> None:
    roomy = limits(quantum=0, max_loras=2, max_num_seqs=8, max_num_batched_tokens=32)
    assert quantum_floor(roomy) == 32
    assert resolved_quantum(roomy) == 20 * 2 * 4 * 2
    check_limits(roomy)
    assert resolved_quantum(limits(quantum=77)) == 77
