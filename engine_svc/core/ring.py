"""A line of flows in the order in which they get something: the ring of places, the queue of loads.

    class ── tenants, least recently served first ── a tenant's flows, first come first

What comes free goes to the first tenant's first flow, and that tenant goes to the tail. Of every
`batch_grant_every` grants one goes to class batch while both classes stand here. A flow keeps its
time of arrival while it is elsewhere; an account that comes back keeps the time of its last grant,
so nobody is overtaken twice by one tenant. Nothing is done for flows that do not stand here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from engine_svc.core.flow import Flow
from engine_svc.core.shares import Share
from engine_svc.types import FlowKey, ServiceClass

_INTERACTIVE, _BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH


class _Standing:
    """An account with flows in the line."""

    __slots__ = ("account", "arrivals", "flows", "since")

    def __init__(self, account: Share, since: int) -> None:
        self.account = account
        #: its arrival or last grant, as a count of events
        self.since = since
        #: in the order of arrival, and when they arrived
        self.flows: list[Flow] = []
        self.arrivals: list[int] = []


class Ring:
    """Flows by class, tenant and arrival. `line` tells a ring from the other."""

    def __init__(self, line: int, batch_grant_every: int) -> None:
        self._line = line
        self._every = batch_grant_every
        self._accounts: dict[ServiceClass, list[_Standing]] = {c: [] for c in ServiceClass}
        #: `since` of each, by which they are found
        self._times: dict[ServiceClass, list[int]] = {c: [] for c in ServiceClass}
        self._by_tenant: dict[ServiceClass, dict[str, _Standing]] = {c: {} for c in ServiceClass}
        #: grants to class interactive since the last one to batch
        self._before_batch = batch_grant_every - 1
        self._num_flows = 0
        #: the first flows as they were asked for last, until something changes
        self._first: list[Flow] = []
        self._first_count = 0

    def __len__(self) -> int:
        return self._num_flows

    def __iter__(self) -> Iterator[Flow]:
        """In the order of the coming grants, as things stand."""
        batch, interactive = self._rounds(_BATCH), self._rounds(_INTERACTIVE)
        before_batch = self._before_batch
        while True:
            turn_of_batch = before_batch >= self._every - 1
            flow = next(batch, None) if turn_of_batch else next(interactive, None)
            if flow is None:
                flow = next(interactive, None) if turn_of_batch else next(batch, None)
            if flow is None:
                return
            before_batch = 0 if flow.key.service_class is _BATCH else before_batch + 1
            yield flow

    def first(self, count: int) -> list[Flow]:
        if count > self._first_count:
            self._first, self._first_count = list(islice(self, count)), count
        return self._first[:count]

    def next_sibling(self, flow: Flow) -> Flow | None:
        """The first other flow of its account that stands here."""
        standing = self._by_tenant[flow.key.service_class].get(flow.key.tenant)
        siblings = () if standing is None else standing.flows[:2]
        return next((other for other in siblings if other is not flow), None)

    def num_before(self, flow: Flow) -> int:
        """The most grants that come before the flow's, whatever arrives: each tenant ahead of its
        own has one for each flow up to its own, and the classes take their turns."""
        times = self._times[flow.key.service_class]
        standing = self._by_tenant[flow.key.service_class][flow.key.tenant]
        number = bisect_left(standing.arrivals, flow.queued_at)
        place = number * len(times) + bisect_left(times, standing.since)
        return self._among_classes(flow.key, place)

    def num_before_newcomer(self, key: FlowKey) -> int:
        """The same for a flow that would come now."""
        times = self._times[key.service_class]
        standing = self._by_tenant[key.service_class].get(key.tenant)
        if standing is None:
            return self._among_classes(key, len(times))
        place = bisect_left(times, standing.since)
        return self._among_classes(key, len(standing.flows) * len(times) + place)

    def tenants(self, service_class: ServiceClass) -> list[tuple[Share, int]]:
        """Accounts that stand here and the number of their flows, who comes next first."""
        return [(one.account, len(one.flows)) for one in self._accounts[service_class]]

    def add(self, flow: Flow) -> None:
        assert flow.line < 0
        standings = self._by_tenant[flow.key.service_class]
        standing = standings.get(flow.key.tenant)
        if standing is None:
            since = max(flow.queued_at, flow.account.last_grants[self._line])
            standing = standings[flow.key.tenant] = _Standing(flow.account, since)
            times = self._times[flow.key.service_class]
            row = bisect_left(times, since)
            times.insert(row, since)
            self._accounts[flow.key.service_class].insert(row, standing)
        place = bisect_left(standing.arrivals, flow.queued_at)
        standing.arrivals.insert(place, flow.queued_at)
        standing.flows.insert(place, flow)
        flow.line = self._line
        self._num_flows += 1
        self._first_count = 0

    def remove(self, flow: Flow) -> None:
        standing = self._by_tenant[flow.key.service_class][flow.key.tenant]
        place = bisect_left(standing.arrivals, flow.queued_at)
        del standing.flows[place], standing.arrivals[place]
        flow.line = -1
        self._num_flows -= 1
        self._first_count = 0
        if not standing.flows:
            del self._by_tenant[flow.key.service_class][flow.key.tenant]
            self._take_out(standing, flow.key.service_class)

    def granted(self, flow: Flow, event: int) -> None:
        """The flow, which still stands here or did until now, had its grant: its tenant goes to
        the tail."""
        service_class = flow.key.service_class
        flow.account.last_grants[self._line] = event
        self._first_count = 0
        if service_class is _BATCH:
            self._before_batch = 0
        else:
            self._before_batch = min(self._before_batch + 1, self._every - 1)
        standing = self._by_tenant[service_class].get(flow.key.tenant)
        if standing is not None:
            self._take_out(standing, service_class)
            standing.since = event
            self._accounts[service_class].append(standing)
            self._times[service_class].append(event)

    def _take_out(self, standing: _Standing, service_class: ServiceClass) -> None:
        times = self._times[service_class]
        row = bisect_left(times, standing.since)
        del times[row], self._accounts[service_class][row]

    def _among_classes(self, key: FlowKey, place: int) -> int:
        """Grants before the one that has so many of its own class before it."""
        if not (self._times[_BATCH] and self._times[_INTERACTIVE]):
            alone = self._times[key.service_class] or not self._num_flows
            if alone:
                return place
        if key.service_class is _BATCH:
            return (place + 1) * self._every - 1
        return -(-(place + 1) * self._every // (self._every - 1)) - 1

    def _rounds(self, service_class: ServiceClass) -> Iterator[Flow]:
        line, number, found = self._accounts[service_class], 0, True
        while found:
            found = False
            for standing in line:
                if number < len(standing.flows):
                    found = True
                    yield standing.flows[number]
            number += 1

    def check_integrity(self) -> None:
        count = 0
        first = list(islice(self, self._first_count))
        assert not self._first_count or first == self._first, "the first are not first any more"
        for service_class, line in self._accounts.items():
            times = [standing.since for standing in line]
            assert times == sorted(set(times)), "tenants are out of order"
            assert times == self._times[service_class], "a tenant's time is lost"
            for standing in line:
                order = [flow.queued_at for flow in standing.flows]
                assert order == sorted(set(order)), "a tenant's flows are out of order"
                assert order == standing.arrivals, "a tenant's flows and arrivals differ"
                assert order, "a tenant stands for nothing"
                assert all(flow.line == self._line for flow in standing.flows)
                count += len(order)
        assert count == self._num_flows
