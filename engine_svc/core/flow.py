"""A live flow: what one tenant's one class wants of one adapter, and the flow's share."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from typing import TYPE_CHECKING

from engine_svc.core.sequence import Age, Sequence
from engine_svc.core.shares import Share
from engine_svc.types import FlowKey

if TYPE_CHECKING:
    from engine_svc.core.lane import Lane


def _age(sequence: Sequence) -> Age:
    return sequence.age


class Flow:
    """The sequences of a flow that wait, oldest first, and its entry in the ring."""

    __slots__ = (
        "account", "is_listed", "key", "lane", "line", "num_queued", "num_requests", "num_running",
        "queued_at", "queued_step", "queued_tokens", "share", "suspended", "waiting",
    )  # fmt: skip

    def __init__(self, key: FlowKey, lane: Lane, share: Share) -> None:
        assert share.parent is not None
        self.key = key
        self.lane = lane
        self.share = share
        self.account = share.parent
        self.waiting: OrderedDict[Age, Sequence] = OrderedDict()
        self.suspended: list[Sequence] = []
        self.num_running = 0
        self.num_requests = 0
        #: requests without their first chunk, and their prompt tokens
        self.num_queued = 0
        self.queued_tokens = 0
        #: when its demand began or its last turn ended, as a count of such events
        self.queued_at = -1
        self.queued_step = 0
        #: the line that it stands in: −1 none, 0 the ring, 1 the queue of loads
        self.line = -1
        #: it is among the heads of open turns
        self.is_listed = False

    @property
    def num_deferred(self) -> int:
        return len(self.waiting) + len(self.suspended)

    @property
    def level(self) -> tuple[float, float, float]:
        """Counters of its class, its account and its own: comparable among all flows."""
        account = self.account
        assert account.parent is not None
        return account.parent.counter, account.counter, self.share.counter

    @property
    def first_age(self) -> Age:
        first = self.first()
        return (-1, -1) if first is None else first.age

    def first(self) -> Sequence | None:
        """Who starts next: what was running before, then what arrived first."""
        if self.suspended:
            return self.suspended[0]
        for sequence in self.waiting.values():
            return sequence
        return None

    def suspend(self, sequence: Sequence) -> None:
        insort(self.suspended, sequence, key=_age)
