"""Who starts next among those who wait in adapters that hold a place: the least virtual counter, of
the classes, of their tenants, of a tenant's flows.

Each class has a heap of accounts, each account a heap of its flows that wait in a turn. Counters
only grow, so those from earlier are lower bounds, corrected at the top; flows of turns that closed
leave there too. A charge therefore moves one flow and one account, whoever else waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from engine_svc.core.flow import Flow
from engine_svc.core.lane import Lane
from engine_svc.core.sequence import Age, Sequence
from engine_svc.core.shares import Ledger, Share
from engine_svc.core.turns import Turns
from engine_svc.types import ServiceClass

#: counter, oldest who waits, number
_Entry = tuple[float, Age, int]


class Heads:
    """Flows of open turns in which somebody waits."""

    def __init__(self, ledger: Ledger) -> None:
        self._classes = [(ledger.class_of(c), c) for c in ServiceClass]
        self._accounts: dict[ServiceClass, list[tuple[_Entry, Share]]] = {
            c: [] for c in ServiceClass
        }
        self._flows: dict[Share, list[tuple[_Entry, Flow]]] = {}
        self._serial = 0
        #: flows whose first sequence is still in flight
        self._aside: list[Flow] = []

    def note(self, flow: Flow, has_turn: bool) -> None:
        """Somebody of the flow waits from now on."""
        if flow.is_listed:
            return
        if has_turn:
            self._list(flow)
        else:
            flow.lane.unlisted[flow] = None

    def opened(self, lane: Lane) -> None:
        """The adapter's turn began, or goes on after all."""
        for flow in lane.unlisted:
            if flow.num_deferred and not flow.is_listed:
                self._list(flow)
        lane.unlisted.clear()

    def _list(self, flow: Flow) -> None:
        flow.is_listed = True
        account = flow.account
        flows = self._flows.get(account)
        if flows is None:
            flows = self._flows[account] = []
            entry = self._entry(account.counter, flow)
            heapq.heappush(self._accounts[flow.key.service_class], (entry, account))
        heapq.heappush(flows, (self._entry(flow.share.counter, flow), flow))

    def _entry(self, counter: float, flow: Flow) -> _Entry:
        self._serial += 1
        return counter, flow.first_age, self._serial

    def first(self, turns: Turns, in_flight: Callable[[Sequence], bool]) -> Sequence | None:
        """Who starts next; None when nobody is left. It is first until it has started."""
        (one, first_class), (other, second_class) = self._classes
        order = (first_class, second_class)
        for service_class in order if one.counter <= other.counter else order[::-1]:
            heap = self._accounts[service_class]
            while heap:
                (counter, age, number), account = heap[0]
                if counter != account.counter:
                    heapq.heapreplace(heap, ((account.counter, age, number), account))
                    continue
                sequence = self._first_of(self._flows[account], turns, in_flight)
                if sequence is not None:
                    return sequence
                heapq.heappop(heap)
                del self._flows[account]
        return None

    def _first_of(
        self,
        flows: list[tuple[_Entry, Flow]],
        turns: Turns,
        in_flight: Callable[[Sequence], bool],
    ) -> Sequence | None:
        while flows:
            (counter, age, number), flow = flows[0]
            sequence = flow.first()
            turn = turns.get(flow.lane.digest)
            if sequence is None or turn is None or turn.closing_since is not None:
                heapq.heappop(flows)
                flow.is_listed = False
                if sequence is not None:
                    flow.lane.unlisted[flow] = None
            elif counter != flow.share.counter or age != sequence.age:
                entry = (flow.share.counter, sequence.age, number)
                heapq.heapreplace(flows, (entry, flow))
            elif in_flight(sequence):
                heapq.heappop(flows)
                self._aside.append(flow)
            else:
                return sequence
        return None

    def put_back(self) -> None:
        """The step is formed."""
        for flow in self._aside:
            self._list(flow)
        self._aside.clear()

    def check_integrity(self, lane: Lane, is_open: bool) -> None:
        """Every flow in which somebody waits is found in its turn, in time."""
        for flow in lane.flows.values():
            if not flow.num_deferred:
                continue
            if not flow.is_listed:
                assert not is_open, f"{flow.key} waits in an open turn and is not found"
                assert flow in lane.unlisted, f"{flow.key} is forgotten"
                continue
            mine = [entry for entry, other in self._flows[flow.account] if other is flow]
            assert len(mine) == 1, f"{flow.key} is listed {len(mine)} times"
            assert mine[0][0] <= flow.share.counter, f"{flow.key} is found too late"
            accounts = self._accounts[flow.key.service_class]
            own = [entry for entry, account in accounts if account is flow.account]
            assert len(own) == 1, f"the account of {flow.key} is listed {len(own)} times"
            assert own[0][0] <= flow.account.counter, f"{flow.key} is found too late"
