"""Invariant 6: who gives pages, and that no token is charged twice. Independent of the core's own
accounts: victims are looked at when they are taken, charges are recomputed from the plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from engine_svc.core import budget, loads, pressure, start
from engine_svc.core.books import Books
from engine_svc.core.flow import Flow
from engine_svc.core.lane import Lane
from engine_svc.core.pressure import Claim
from engine_svc.core.sequence import Age, Sequence, SequenceState
from engine_svc.types import EngineLimits, FlowKey, Request, StepPlan


@dataclass
class Asking:
    """Who asks for pages, and how much that may disturb; a load asks for a lane, and takes more for
    the oldest only where its adapter is the first that lacks a slot."""

    sequence: Sequence | None
    lane: Lane
    claim: Claim
    is_first: bool = True


_asking: list[Asking] = []


def _listen() -> None:
    """Know who asks: the moves of the books do not say for whom a victim is taken."""
    make_room, make_room_for_load = pressure.make_room, pressure.make_room_for_load

    def for_sequence(
        books: Books, count: int, sequence: Sequence, claim: Claim, *rest: object
    ) -> bool:
        _asking.append(Asking(sequence, sequence.lane, claim))
        try:
            return make_room(books, count, sequence, claim, *rest)  # type: ignore[arg-type]
        finally:
            _asking.pop()

    def for_load(books: Books, lane: Lane, count: int, ahead: set[str], *rest: object) -> bool:
        _asking.append(Asking(None, lane, Claim.TURN, not ahead))
        try:
            return make_room_for_load(books, lane, count, ahead, *rest)  # type: ignore[arg-type]
        finally:
            _asking.pop()

    for module in (budget, start, pressure):
        module.make_room = for_sequence  # type: ignore[attr-defined]
    for module in (loads, pressure):
        module.make_room_for_load = for_load  # type: ignore[attr-defined]


_listen()


class VictimWatch:
    """Each preemption takes whom it may."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self.num_taken = 0
        #: for the oldest that could run, which may take more
        self.num_for_oldest = 0
        self._preempt = books.preempt
        books.preempt = self._checked  # type: ignore[method-assign]

    def _checked(self, victim: Sequence, now: float) -> None:
        assert _asking, "somebody lost its pages to nobody"
        asking = _asking[-1]
        living = [
            s
            for live in self.books.requests.values()
            for s in live.sequences
            if s.state is not SequenceState.ENDED and not s.exhausted
        ]
        assert victim in living
        assert victim is not min(living, key=_age), "the oldest live sequence lost its pages"
        here = [s for s in living if s.lane.digest not in self.books.absent]
        oldest = min(here, key=_age)
        own = asking.sequence is oldest
        if asking.sequence is None:
            own = asking.is_first and asking.lane is oldest.lane
        self.num_taken += 1
        self.num_for_oldest += own
        self._check_order(victim, asking, living, own)
        if not own:
            assert victim.num_planned > victim.furthest, "it has not advanced on its pages"
            assert not self._begins(victim), "its flow's turn has just begun"
        self._preempt(victim, now)

    def _check_order(
        self, victim: Sequence, asking: Asking, living: list[Sequence], own: bool
    ) -> None:
        """Paused ones first, newest first; then who had most, newest first among equals."""
        before = [
            s
            for s in living
            if s.page_ids
            and s not in (victim, asking.sequence, min(living, key=_age))
            and (own or (s.num_planned > s.furthest and not self._begins(s)))
        ]
        paused = [s for s in before if s.state is SequenceState.SUSPENDED]
        if victim.state is SequenceState.SUSPENDED:
            assert all(s.age < victim.age for s in paused), "a newer paused sequence kept its pages"
            return
        assert not paused, "a running sequence lost its pages before a paused one"
        assert asking.claim is not Claim.MODEST
        if asking.claim is Claim.RUNNING and not own:
            assert asking.sequence is not None
            assert victim.age > asking.sequence.age, "an older sequence lost its pages"
            before = [s for s in before if s.age > asking.sequence.age]
        served = (*victim.flow.level, victim.age)
        running = [s for s in before if s.state is SequenceState.RUNNING]
        assert all((*s.flow.level, s.age) <= served for s in running), "somebody has had more"

    def _begins(self, sequence: Sequence) -> bool:
        turn = self.books.turns.get(sequence.lane.digest)
        begins = turn is not None and turn.first_step == self.books.next_step
        return begins and turn is not None and turn.flow is sequence.flow


def _age(sequence: Sequence) -> Age:
    return sequence.age


class ChargeWatch:
    """A flow is charged for each position that a plan computes for the first time in the request's
    life, at its price, and for nothing else."""

    def __init__(self, books: Books, limits: EngineLimits) -> None:
        self.limits = limits
        #: by flow, charged − computed
        self._balance: defaultdict[FlowKey, float] = defaultdict(float)
        #: by flow, priced, what was computed for the first time
        self.total: defaultdict[FlowKey, float] = defaultdict(float)
        #: positions that were computed again, and that were found
        self.num_again = 0
        self.num_found = 0
        self._seats: dict[int, tuple[Request, int]] = {}
        self._reached: dict[tuple[str, int], int] = {}
        self._turns = books.turns
        self._charge_flow = books.charges.flow
        books.charges.flow = self._charged  # type: ignore[method-assign]
        self._charge_decodes = books.charges.decodes
        books.charges.decodes = self._decodes_charged  # type: ignore[method-assign]

    def _charged(self, flow: Flow, service: float) -> None:
        self._balance[flow.key] += service
        self._charge_flow(flow, service)

    def _decodes_charged(self) -> None:
        before = [(turn, turn.service) for turn in self._turns]
        self._charge_decodes()
        for turn, service in before:
            charged, rows = turn.service - service, turn.lane.rows
            assert charged == sum(rows.values()) * self.limits.decode_price
            for flow, count in rows.items():
                self._balance[flow.key] += count * self.limits.decode_price

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
            self.total[request.flow] += price
            self._reached[key] = max(reached, end)

    def check(self) -> None:
        """After a step."""
        for key, balance in self._balance.items():
            assert abs(balance) < 1e-6, f"{key} was charged {balance} more than was computed"
        self._balance.clear()
