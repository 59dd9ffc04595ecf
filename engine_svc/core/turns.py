"""Turns: an adapter's time in a place, bounded by service and by steps, ended softly.

running ──due while somebody waits──▶ closing (nobody new) ──closing_steps──▶ over
                                                 └──another quantum of service──▶ over

What a turn serves beyond its quantum while somebody waits is a debt, taken off the allowance of
later turns, so that long steps and soft ends do not add up. The tenant owes it to other tenants and
pays with its next turn, whichever adapter has that; the flow owes it to its tenant's other flows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine_svc.core.flow import Flow
from engine_svc.core.lane import Lane
from engine_svc.core.slots import Slot
from engine_svc.types import BASE_DIGEST, EngineLimits


def quantum_of(flow: Flow, quantum: float) -> float:
    """A turn's service: the quantum × the tenant's weight, divided among the tenant's demanding
    adapters by their weights, each of which has one turn a round."""
    account = flow.account
    even = account.num_active / account.active_weight if account.num_active else 1.0
    return quantum * account.weight * flow.share.weight * even


def steps_of(flow: Flow, num_steps: int, limits: EngineLimits) -> int:
    """After which its turn is due where an even one is after `num_steps`. Steps end most turns, so
    they divide by weights what turns serve, among the demanding tenants of a class and inside a
    tenant as `quantum_of` does; the soft end counts, and `turn_max_steps` stays the bound."""
    tenants, closing = flow.account.parent, limits.closing_steps
    assert tenants is not None, "an account without a class"
    mean = tenants.active_weight / tenants.num_active if tenants.num_active else 1.0
    steps = quantum_of(flow, num_steps + closing) / mean - closing
    return round(min(max(steps, 1.0), limits.turn_max_steps))


def allowance_of(flow: Flow, quantum: float) -> float:
    """The quantum without what is owed; what a tenant's last adapters overdrew, its next pays."""
    return quantum - max(flow.account.debt, flow.share.debt)


@dataclass(slots=True, eq=False)
class Turn:
    """One lane in a place; service counts at the configured prices."""

    lane: Lane
    #: whose place in the ring brought the turn
    flow: Flow
    first_step: int
    #: the service of a whole turn, and of this one: what is owed is taken off
    quantum: float
    allowance: float
    began_s: float
    #: None: the base's
    slot: Slot | None
    #: steps after which it is due: while pages are to spare, and while they are short
    short_steps: int
    long_steps: int
    service: float = 0.0
    #: served while nobody waited
    free: float = 0.0
    closing_since: int | None = None
    #: begun out of the ring's order, so that the oldest sequence ends while all others lack pages
    is_rescue: bool = False

    def is_over(self, step: int, limits: EngineLimits) -> bool:
        return self.closing_since is not None and (
            step - self.closing_since >= limits.closing_steps
            or self.service - self.allowance >= self.quantum
        )

    def spend_freely(self) -> None:
        """Nobody waits for what it holds: what it was served until now owes nothing."""
        if self.service > self.allowance:
            self.free += self.service - self.allowance
            self.allowance = self.service


class Turns:
    """Who holds a place. The base takes turns too, but none of max_loras."""

    def __init__(self, limits: EngineLimits, quantum: int) -> None:
        self._limits = limits
        self._quantum = quantum
        self._turns: dict[str, Turn] = {}
        self.num_begun = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(list(self._turns.values()))

    def values(self) -> Iterable[Turn]:
        """For loops that begin and end none."""
        return self._turns.values()

    def __contains__(self, digest: object) -> bool:
        return digest in self._turns

    @property
    def num_free_places(self) -> int:
        return self._limits.max_loras - len(self._turns) + (BASE_DIGEST in self._turns)

    def has_place_for(self, lane: Lane) -> bool:
        """It holds one, or needs none, or one is free."""
        return (
            len(self._turns) < self._limits.max_loras
            or lane.is_base
            or lane.digest in self._turns
            or self.num_free_places > 0
        )

    def get(self, digest: str) -> Turn | None:
        return self._turns.get(digest)

    def begin(self, flow: Flow, slot: Slot | None, step: int, now: float) -> None:
        lane = flow.lane
        assert lane.is_base or self.num_free_places > 0, "more turns than places"
        assert lane.is_base or slot is not None, f"{lane.digest} gets a place without a slot"
        self._turns[lane.digest] = self._turn(flow, slot, step, now)

    def renew(self, flow: Flow, step: int, now: float) -> None:
        """The lane's turn ends, and the flow, which is next in the ring, begins one in its
        place."""
        turn = self._turns[flow.lane.digest]
        self._settle(turn)
        self._turns[flow.lane.digest] = self._turn(flow, turn.slot, step, now)

    def end(self, turn: Turn) -> None:
        self._settle(turn)
        del self._turns[turn.lane.digest]

    def _turn(self, flow: Flow, slot: Slot | None, step: int, now: float) -> Turn:
        self.num_begun += 1
        quantum = quantum_of(flow, self._quantum)
        limits, allowance = self._limits, allowance_of(flow, quantum)
        long = steps_of(flow, limits.turn_max_steps, limits)
        short = steps_of(flow, limits.turn_steps, limits) if limits.turn_steps else long
        return Turn(flow.lane, flow, step, quantum, allowance, now, slot, min(short, long), long)

    def _settle(self, turn: Turn) -> None:
        """What it did not use is lost; what it overdrew is owed, what it gave up is paid."""
        excess = max(turn.service, turn.allowance) - turn.free - turn.quantum
        # a light flow's quantum may be less than a step's service, its debt is not
        most = 2.0 * max(turn.quantum, self._quantum)
        for share in (turn.flow.share, turn.flow.account):
            share.debt = min(max(share.debt + excess, 0.0), most)

    def check_integrity(self) -> None:
        assert self.num_free_places >= 0, "more turns than places"
