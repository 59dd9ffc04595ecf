"""Who starts next among those who wait in adapters that hold a place: the least virtual counter."""

from __future__ import annotations

import heapq

from engine_svc.core.books import Books
from engine_svc.core.flow import Flow, Rank
from engine_svc.core.lane import Lane
from engine_svc.core.sequence import Sequence
from engine_svc.core.shares import Share
from engine_svc.types import ServiceClass

_Heap = list[tuple[Rank, int, Lane]]


class Heads:
    """The open turns by class and by the rank of their least flow, for one step. Counters may
    grow meanwhile: what is on top is looked at again."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._heaps: list[tuple[Share, ServiceClass, _Heap]] = []
        #: flows whose first sequence is still in flight
        self._aside: list[Flow] = []
        lanes = [t.lane for t in books.turns if t.closing_since is None and t.lane.num_deferred]
        for service_class in ServiceClass if lanes else ():
            heap: _Heap = []
            for number, lane in enumerate(lanes):
                flow = lane.least(service_class)
                if flow is not None:
                    heap.append((flow.rank, number, lane))
            heapq.heapify(heap)
            self._heaps.append((books.ledger.class_of(service_class), service_class, heap))

    def first(self) -> Sequence | None:
        """Who starts next; None when nobody is left. It is first until it has started."""
        for _, service_class, heap in sorted(self._heaps, key=lambda group: group[0].counter):
            while heap:
                rank, number, lane = heap[0]
                flow = lane.least(service_class)
                if flow is None:
                    heapq.heappop(heap)
                    continue
                present = flow.rank
                if present != rank:
                    heapq.heapreplace(heap, (present, number, lane))
                    continue
                sequence = flow.first()
                assert sequence is not None, "the least flow has nobody who waits"
                if not self._books.in_flight(sequence):
                    return sequence
                lane.take_out(flow)
                self._aside.append(flow)
        return None

    def put_back(self) -> None:
        """The step is formed."""
        for flow in self._aside:
            flow.lane.put_back(flow)
