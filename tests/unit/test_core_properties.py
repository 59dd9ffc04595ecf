"""DESIGN §8's six invariants as state machines: the world and its watches check all of them after
every step, with N, k, M, quantum and prices as the core and the configuration have them.

1 bounded wait       core_invariants.WaitWatch      4 cap             core_fakes.FakeRunner
2 bounded unfairness core_gap.GapWatch              5 admission       core_queue.AdmissionWatch
3 work conserving    core_world.World               6 KV pressure     core_kv.{Victim,Charge}Watch
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine_svc.core.limits import quantum_floor
from engine_svc.types import EngineLimits, ServiceClass, TenantQuota
from tests.support.core_clients import Client, live
from tests.support.core_gap import GapWatch
from tests.support.core_invariants import WaitWatch
from tests.support.core_world import World, adapter, limits

NAMES = ("a", "b", "c", "d", "e")
TENANTS = ("t", "u", "v")
WEIGHTS = st.sampled_from([0.5, 1.0, 2.0, 4.0])
CLASSES = st.sampled_from(list(ServiceClass))
NEVER = 10**6


@st.composite
def tight_limits(draw: st.DrawFn) -> EngineLimits:
    """Few pages, seats, places and tokens."""
    seats, places = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    chunk = draw(st.sampled_from([1, 4]))
    tokens = seats + chunk + draw(st.sampled_from([0, 3, 12]))
    drawn = limits(
        max_loras=places,
        num_slots=places + draw(st.integers(0, 2)),
        max_num_seqs=seats,
        max_num_batched_tokens=tokens,
        num_pages=draw(st.sampled_from([6, 9, 14, 40])),
        page_size=draw(st.sampled_from([1, 4])),
        context_tokens=40,
        quantum=0,
        turn_steps=draw(st.sampled_from([0, 1, 5])),
        turn_max_steps=draw(st.sampled_from([2, 9, 40])),
        closing_steps=draw(st.integers(0, 5)),
        min_chunk=chunk,
        run_ahead=draw(st.integers(0, 1)),
        prefix_cache=draw(st.booleans()),
        max_queued_requests=draw(st.sampled_from([4, 12])),
        max_queued_tokens=draw(st.sampled_from([20, 400])),
        max_queue_wait_s=draw(st.sampled_from([0.2, 30.0])),
    )
    quantum = draw(st.sampled_from([0, quantum_floor(drawn), 3 * quantum_floor(drawn)]))
    return limits(**{**_fields(drawn), "quantum": quantum})


def _fields(drawn: EngineLimits) -> dict[str, object]:
    return {name: getattr(drawn, name) for name in EngineLimits.__slots__}


class Pressure(RuleBasedStateMachine):
    """All invariants but the gap, where everything is short and anything may fail."""

    @initialize(
        given=tight_limits(),
        pages=st.integers(1, 3),
        copy=st.integers(0, 3),
        load=st.integers(0, 6),
    )
    def begin(self, given: EngineLimits, pages: int, copy: int, load: int) -> None:
        self.world = World(given, adapter_pages=pages)
        self.world.writer.delay = lambda: copy
        self.world.weights.delay = lambda: load
        self.world.watch = WaitWatch(copy_steps=copy + 2)

    @rule(
        name=st.sampled_from([None, *NAMES]), tenant=st.sampled_from(TENANTS), kind=CLASSES,
        prompt=st.integers(1, 16), max_tokens=st.sampled_from([1, 3, 20]),
        n=st.sampled_from([1, 1, 1, 2]), wait_s=st.sampled_from([0.05, 1.0, 1e9, 1e9]),
        fresh=st.booleans(),
    )  # fmt: skip
    def submit(
        self, name: str | None, tenant: str, kind: ServiceClass, prompt: int, max_tokens: int,
        n: int, wait_s: float, fresh: bool,
    ) -> None:  # fmt: skip
        ref = None if name is None else adapter(name)
        tokens: int | tuple[int, ...] = prompt if fresh else tuple(range(prompt))
        self.world.submit(
            tokens, ref, max_tokens=max_tokens, tenant=tenant, service_class=kind, n=n,
            deadline_s=self.world.clock.now() + wait_s,
        )  # fmt: skip

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(pick=st.integers(0, 40))
    def cancel(self, pick: int) -> None:
        self.world.cancel(f"r{pick}")

    @rule(tenant=WEIGHTS, own=WEIGHTS)
    def reweigh(self, tenant: float, own: float) -> None:
        self.world.core.set_shares({"t": tenant}, {"sha256:a": own})

    @rule(requests=st.integers(0, 3), tokens=st.integers(0, 40))
    def limit(self, requests: int, tokens: int) -> None:
        self.world.core.set_quotas({"v": TenantQuota(requests, tokens)})

    @rule(loads=st.sets(st.sampled_from(NAMES)), copies=st.sets(st.sampled_from(NAMES), max_size=1))
    def spoil(self, loads: set[str], copies: set[str]) -> None:
        self.world.weights.failing = {adapter(name).digest for name in loads}
        self.world.writer.failing = {adapter(name).digest for name in copies}

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.core.drain()
            self.world.run(20_000)


class Backlog(RuleBasedStateMachine):
    """Invariant 2: some demand throughout, others come and go, and a turn ends by its service. The
    flows of a tenant are alike: one whose requests end in fewer steps than a seat stays with its
    siblings may lose its turn with its seat, and has less."""

    @initialize(
        places=st.integers(1, 5), seats=st.integers(1, 6), more_tokens=st.sampled_from([0, 6, 30]),
        closing=st.sampled_from([0, 3, 12]), ahead=st.integers(0, 1),
        quantums=st.integers(1, 3), weights=st.lists(WEIGHTS, min_size=3, max_size=3),
        sizes=st.lists(
            st.tuples(st.sampled_from([2, 12, 60]), st.sampled_from([1, 8, 30])),
            min_size=3, max_size=3,
        ),
        owners=st.lists(st.integers(0, 2), min_size=2, max_size=6),
        turn=st.sampled_from([0, 3, 20]),
    )  # fmt: skip
    def begin(
        self, places: int, seats: int, more_tokens: int, closing: int, ahead: int, quantums: int,
        weights: list[float], sizes: list[tuple[int, int]], owners: list[int], turn: int,
    ) -> None:  # fmt: skip
        roomy = limits(
            max_loras=places, num_slots=16, max_num_seqs=seats, num_pages=3000, context_tokens=100,
            max_num_batched_tokens=seats + 4 + more_tokens, closing_steps=closing, quantum=0,
            turn_steps=turn, turn_max_steps=NEVER, run_ahead=ahead, prefetch_adapters=8,
            max_wanted=32, max_queue_wait_s=1e9,
        )  # fmt: skip
        quantum = quantums * quantum_floor(roomy)
        self.world = World(limits(**{**_fields(roomy), "quantum": quantum}))
        self.world.gap = GapWatch(self.world.limits)
        self.world.core.set_shares(dict(zip(TENANTS, weights, strict=True)), {})
        self.clients = [
            Client(
                self.world, adapter(f"s{i}"), depth=2 * seats + 1, prompt=sizes[owner][0],
                max_tokens=sizes[owner][1], tenant=TENANTS[owner],
            )
            for i, owner in enumerate(owners)
        ]  # fmt: skip

    @rule(count=st.integers(1, 60))
    def step(self, count: int) -> None:
        live(self.world, self.clients, count)

    @rule(
        name=st.sampled_from([None, "s0", *NAMES]), tenant=st.sampled_from([*TENANTS, "w"]),
        prompt=st.integers(1, 20), max_tokens=st.sampled_from([1, 20]), kind=CLASSES,
    )  # fmt: skip
    def visit(
        self, name: str | None, tenant: str, prompt: int, max_tokens: int, kind: ServiceClass
    ) -> None:
        ref = None if name is None else adapter(name)
        self.world.submit(prompt, ref, max_tokens=max_tokens, tenant=tenant, service_class=kind)

    @rule(pick=st.integers(0, 60))
    def cancel(self, pick: int) -> None:
        self.world.cancel(f"r{pick}")

    @rule(weight=WEIGHTS)
    def reweigh(self, weight: float) -> None:
        self.world.core.set_shares({"t": weight}, {})
        assert self.world.gap is not None
        self.world.gap.reweighed()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run(20_000)


def _profile(max_examples: int, steps: int) -> settings:
    return settings(
        derandomize=True, deadline=None, max_examples=max_examples, stateful_step_count=steps
    )


TestPressure = Pressure.TestCase
TestPressure.settings = _profile(60, 40)
TestBacklog = Backlog.TestCase
TestBacklog.settings = _profile(40, 15)


@pytest.mark.slow
class TestDeepPressure(Pressure.TestCase):  # type: ignore[misc, name-defined]
    settings = _profile(600, 120)


@pytest.mark.slow
class TestDeepBacklog(Backlog.TestCase):  # type: ignore[misc, name-defined]
    settings = _profile(300, 40)
