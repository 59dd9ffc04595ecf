"""Invariant 6: who gives pages, and that no token is charged twice. Independent of the core's own
accounts: victims are looked at when they are taken, charges are recomputed from the plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from engine_svc.core.books import Books
from engine_svc.core.flow import Flow
from engine_svc.core.sequence import Sequence, SequenceState
from engine_svc.core.turns import Turn
from engine_svc.types import EngineLimits, FlowKey, Request, StepPlan


class VictimWatch:
    """Each preemption takes whom it may."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.num_taken = 0
        self._preempt = books.preempt
        books.preempt = self._checked  # type: ignore[method-assign]

    def _checked(self, victim: Sequence, now: float) -> None:
        books = self.books
        living = [
            s
            for live in books.requests.values()
            for s in live.sequences
            if s.state is not SequenceState.ENDED and not s.exhausted
        ]
        oldest = min(living, key=lambda s: s.age)
        assert victim is not oldest, "the oldest live sequence lost its pages"
        others = [
            s
            for s in living
            if s.page_ids and s is not victim and s is not oldest and s.num_planned > s.furthest
        ]
        if victim.state is SequenceState.RUNNING:
            paused = [s for s in others if s.state is SequenceState.SUSPENDED]
            assert not paused, "a running sequence lost its pages before a paused one"
            served = (*victim.flow.level, victim.age)
            before = [
                s
                for s in others
                if s.state is SequenceState.RUNNING
                and (*s.flow.level, s.age) > served
                and s.age > victim.age
            ]
            assert not before, "somebody newer has had more"
        if not self._oldest_is_stuck(living):
            assert victim.num_planned > victim.furthest, "it has not advanced on its pages"
            turn = books.turns.get(victim.lane.digest)
            begins = turn is not None and turn.first_step == books.next_step
            assert not begins or turn.flow is not victim.flow, "its flow's turn has just begun"
        self.num_taken += 1
        self._preempt(victim, now)

    def _oldest_is_stuck(self, living: list[Sequence]) -> bool:
        """The oldest whose weights are here lacks a page or a slot: it may take what it needs."""
        here = [s for s in living if s.lane.digest not in self.books.absent]
        if not here:
            return False
        first = min(here, key=lambda s: s.age)
        slots = self.books.memory.slots
        if not first.lane.is_base and slots.ready(first.lane.digest) is None:
            return True
        room = len(first.page_ids) * self.books.limits.page_size
        return first.state is not SequenceState.RUNNING or first.num_planned + 1 >= room - 1


class ChargeWatch:
    """A flow is charged for each position that a plan computes for the first time in the request's
    life, at its price, and for nothing else."""

    def __init__(self, books: Books, limits: EngineLimits) -> None:
        self.limits = limits
        #: by flow, charged − computed
        self._balance: defaultdict[FlowKey, float] = defaultdict(float)
        #: positions that were computed again, and that were found
        self.num_again = 0
        self.num_found = 0
        self._seats: dict[int, tuple[Request, int]] = {}
        self._reached: dict[tuple[str, int], int] = {}
        self._charge_flow = books.charge_flow
        books.charge_flow = self._charged  # type: ignore[method-assign]
        self._charge_decodes = books.charge_decodes
        books.charge_decodes = self._decodes_charged  # type: ignore[method-assign]

    def _charged(self, flow: Flow, service: float) -> None:
        self._balance[flow.key] += service
        self._charge_flow(flow, service)

    def _decodes_charged(self, counts: list[tuple[Turn, Flow, int]]) -> None:
        for _, flow, count in counts:
            self._balance[flow.key] += count * self.limits.decode_price
        self._charge_decodes(counts)

    def planned(self, plan: StepPlan, by_seed: Callable[[int], Request]) -> None:
        """`by_seed`: the request whose sampling has this seed, each has its own."""
        for opening in plan.seat_openings:
            self._seats[opening.seat] = (by_seed(opening.sampling.seed), opening.choice)
        for chunk in plan.chunks:
            request, choice = self._seats[chunk.seat]
            prompt = len(request.prompt_token_ids)
            key = (request.request_id, choice)
            # choices share the prompt, which the first computes
            reached = self._reached.get(key, prompt if choice else 0)
            end = chunk.start + chunk.num_tokens
            first = max(chunk.start, reached)
            self.num_again += max(0, min(end, reached) - chunk.start)
            self.num_found += max(0, chunk.start - reached)
            num_decoded = max(0, end - max(first, prompt))
            num_prompt = max(0, end - first) - num_decoded
            limits = self.limits
            price = num_prompt * limits.prefill_price + num_decoded * limits.decode_price
            self._balance[request.flow] -= price
            self._reached[key] = max(reached, end)

    def check(self) -> None:
        """After a step."""
        for key, balance in self._balance.items():
            assert abs(balance) < 1e-6, f"{key} was charged {balance} more than was computed"
        self._balance.clear()
