"""A lane: all requests for one adapter (or the base), of whatever tenant and class."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict

from engine_svc.core.sequence import Age, Sequence, SequenceState
from engine_svc.core.waits import Cause, WaitClock
from engine_svc.types import BASE_DIGEST, AdapterRef


def _age(sequence: Sequence) -> Age:
    return sequence.age


class Lane:
    """The sequences of one adapter by state, oldest first, and what they wait for."""

    def __init__(
        self,
        ref: AdapterRef | None,
        max_total: int,
        cause: Cause,
        now: float,
        deferred: list[int],
    ) -> None:
        self.ref = ref
        self.digest = BASE_DIGEST if ref is None else ref.digest
        self.weight = 1.0 if ref is None else ref.weight
        self.clock = WaitClock(cause, now)
        self.num_requests = 0
        self.waiting: OrderedDict[Age, Sequence] = OrderedDict()
        self.suspended: list[Sequence] = []
        self.running: dict[Age, Sequence] = {}
        #: when its demand began or its last turn ended, as a count of such events
        self.queued_at = -1
        self.in_ring = False
        self.wanted_s = now
        #: tokens that a sequence may have, once the adapter's size is known
        self.max_total = max_total
        #: sequences that wait, by cause, over all lanes; shared
        self._deferred = deferred

    @property
    def is_base(self) -> bool:
        return self.digest == BASE_DIGEST

    @property
    def num_deferred(self) -> int:
        return len(self.waiting) + len(self.suspended)

    def blame(self, cause: Cause, now: float) -> None:
        """What waits here waits for `cause` from now on."""
        if cause is not self.clock.cause:
            self._deferred[self.clock.cause] -= self.num_deferred
            self._deferred[cause] += self.num_deferred
            self.clock.turn(cause, now)

    def first(self) -> Sequence | None:
        """Who starts next: what was running before, then what arrived first."""
        if self.suspended:
            return self.suspended[0]
        return next(iter(self.waiting.values()), None)

    def put(self, sequence: Sequence, state: SequenceState) -> None:
        """Move a sequence into a state."""
        self._take(sequence)
        sequence.state = state
        if state is SequenceState.RUNNING:
            self.running[sequence.age] = sequence
            return
        if state is SequenceState.ENDED:
            return
        self._deferred[self.clock.cause] += 1
        if state is SequenceState.WAITING:
            self.waiting[sequence.age] = sequence
        else:
            insort(self.suspended, sequence, key=_age)

    def _take(self, sequence: Sequence) -> None:
        if self.running.pop(sequence.age, None) is not None:
            return
        if sequence.state is SequenceState.SUSPENDED:
            self.suspended.remove(sequence)
            self._deferred[self.clock.cause] -= 1
        elif self.waiting.pop(sequence.age, None) is not None:
            self._deferred[self.clock.cause] -= 1

    def check_integrity(self) -> None:
        for state, members in (
            (SequenceState.WAITING, list(self.waiting.values())),
            (SequenceState.RUNNING, list(self.running.values())),
            (SequenceState.SUSPENDED, self.suspended),
        ):
            for sequence in members:
                assert sequence.state is state
                assert sequence.lane is self
                assert bool(sequence.seats) is (state is SequenceState.RUNNING)
        ages = [sequence.age for sequence in self.suspended]
        assert ages == sorted(ages), "suspended sequences are out of order"
