"""Virtual counters: how much weighted service everybody had, on three levels.

    engine ── class ── account (a tenant's part of a class) ── flow (one adapter of the account)

A share's *counter* grows by service ÷ weight. Its parent's *virtual* time grows by service ÷ the
weights of all children that are demanding: where the counter of each would be, had they been served
alike. Whoever wakes is lifted to it, so idling saves nothing up; whoever leaves ahead of it is
remembered until it has caught up, so leaving sheds no debt. A flow's weight divides its account's
part and nobody else's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from engine_svc.types import FlowKey, ServiceClass


class Share:
    """One node of the tree."""

    __slots__ = (
        "active_weight", "counter", "debt", "idle", "is_active", "key", "last_grants", "members",
        "num_active", "num_pinned", "parent", "pinned", "remembered_at", "virtual", "weight",
    )  # fmt: skip

    def __init__(self, key: object, parent: Share | None, weight: float) -> None:
        self.key = key
        self.parent = parent
        self.weight = weight
        self.counter = 0.0
        self.virtual = 0.0
        self.num_active = 0
        self.active_weight = 0.0
        self.is_active = False
        #: somebody refers to it: it is not forgotten
        self.pinned = False
        self.num_pinned = 0
        #: the counter with which its parent's `idle` remembers it; −1: not
        self.remembered_at = -1.0
        #: service beyond the quantums of its turns, taken off the next ones
        self.debt = 0.0
        #: an account's last grants in the ring and in the queue of loads, as counts of events
        self.last_grants = [-1, -1]
        #: children that rest ahead of virtual time, least ahead first
        self.idle: list[tuple[float, int, Share]] = []
        #: all children that are remembered
        self.members: dict[object, Share] = {}

    def wake(self) -> None:
        """Demanding from now on, lifted to the virtual time of its siblings."""
        if self.is_active or self.parent is None:
            return
        parent = self.parent
        self.is_active = True
        self.counter = max(self.counter, parent.virtual)
        parent.num_active += 1
        parent.active_weight += self.weight
        parent.wake()

    def rest(self) -> None:
        """Not demanding any more."""
        if not self.is_active or self.parent is None:
            return
        parent = self.parent
        self.is_active = False
        parent.num_active -= 1
        parent.active_weight = parent.active_weight - self.weight if parent.num_active else 0.0
        if not parent.num_active:
            parent.rest()

    def pin(self) -> None:
        """Somebody refers to it; so its parents stay as well."""
        if not self.pinned:
            self.pinned = True
            if self.parent is not None:
                self.parent.num_pinned += 1
                self.parent.pin()

    def unpin(self) -> None:
        """Nobody does. It goes at once, or once virtual time has caught up with its counter."""
        parent = self.parent
        if parent is None:
            return
        self.pinned = False
        parent.num_pinned -= 1
        if self.counter <= parent.virtual:
            parent.members.pop(self.key, None)
        elif self.remembered_at != self.counter:
            self.remembered_at = self.counter
            heapq.heappush(parent.idle, (self.counter, id(self), self))
        if not parent.num_pinned:
            parent.unpin()

    def forget_caught_up(self) -> None:
        """Children that rest and are not ahead any more go."""
        while self.idle and self.idle[0][0] <= self.virtual:
            counter, _, share = heapq.heappop(self.idle)
            if share.remembered_at == counter:
                share.remembered_at = -1.0
                if not share.pinned and self.members.get(share.key) is share:
                    del self.members[share.key]

    def reweigh(self, weight: float) -> None:
        """From now on; what was served stays as it was counted."""
        if self.is_active and self.parent is not None:
            self.parent.active_weight += weight - self.weight
        self.weight = weight


class Ledger:
    """The shares of everybody who demands, or who is ahead of those who do."""

    def __init__(self, batch_grant_every: int) -> None:
        self._root = Share("engine", None, 1.0)
        self._classes = {
            ServiceClass.INTERACTIVE: Share("interactive", self._root, batch_grant_every - 1.0),
            ServiceClass.BATCH: Share("batch", self._root, 1.0),
        }
        self._tenant_weights: Mapping[str, float] = {}
        self._adapter_weights: Mapping[str, float] = {}

    def set_weights(self, tenants: Mapping[str, float], adapters: Mapping[str, float]) -> None:
        """Raises: ValueError for a weight that divides nothing."""
        for kind, weights in (("tenant", tenants), ("adapter", adapters)):
            for name, weight in weights.items():
                if not (math.isfinite(weight) and weight > 0):
                    raise ValueError(f"weight of {kind} {name} is {weight}; must be above 0")
        self._tenant_weights, self._adapter_weights = dict(tenants), dict(adapters)
        for group in self._classes.values():
            for tenant, account in group.members.items():
                account.reweigh(self._tenant_weights.get(str(tenant), 1.0))
                for digest, flow in account.members.items():
                    flow.reweigh(self._adapter_weights.get(str(digest), flow.weight))

    def flow(self, key: FlowKey, weight: float) -> Share:
        """The flow's share, remembered or new, pinned until `release`. `weight` holds for an
        adapter that set_weights does not name."""
        group = self._classes[key.service_class]
        account = group.members.get(key.tenant)
        if account is None:
            account = Share(key.tenant, group, self._tenant_weights.get(key.tenant, 1.0))
            group.members[key.tenant] = account
        flow = account.members.get(key.digest)
        if flow is None:
            flow = Share(key.digest, account, self._adapter_weights.get(key.digest, weight))
            account.members[key.digest] = flow
        flow.pin()
        return flow

    def class_of(self, service_class: ServiceClass) -> Share:
        return self._classes[service_class]

    def charge(self, flow: Share, service: float) -> None:
        """Count service on every level."""
        account = flow.parent
        assert account is not None, "a flow without an account"
        group = account.parent
        assert group is not None, "an account without a class"
        flow.counter += service / flow.weight
        _pass(account, service)
        _pass(group, service)
        _pass(self._root, service)

    def charge_accounts(self, services: Mapping[Share, float]) -> float:
        """Count what accounts' flows were charged on the levels above; returns it all."""
        groups: dict[Share | None, float] = {}
        for account, service in services.items():
            account.counter += service / account.weight
            virtual = account.virtual
            if account.num_active:
                virtual += service / account.active_weight
                account.virtual = virtual
            if account.idle and account.idle[0][0] <= virtual:
                account.forget_caught_up()
            group = account.parent
            groups[group] = groups.get(group, 0.0) + service
        for group, service in groups.items():
            assert group is not None, "an account without a class"
            _pass(group, service)
            _pass(self._root, service)
        return sum(groups.values())

    def release(self, flow: Share) -> None:
        """Nobody refers to the flow any more; it is forgotten once it is not ahead."""
        flow.rest()
        flow.unpin()
        for group in self._classes.values():
            if not group.num_pinned and group.members:
                # nobody of the class is left to whom anybody could owe something
                group.members.clear()
                group.idle.clear()

    @property
    def num_flows(self) -> int:
        """Flows that are remembered."""
        return sum(
            len(account.members)
            for group in self._classes.values()
            for account in group.members.values()
        )

    def check_integrity(self) -> None:
        for group in self._classes.values():
            for parent in (group, *group.members.values()):
                active = [child for child in parent.members.values() if child.is_active]
                assert parent.num_active == len(active), "an active share is lost"
                weight = sum(child.weight for child in active)
                assert math.isclose(parent.active_weight, weight, rel_tol=1e-6, abs_tol=1e-9)
                pinned = [child for child in parent.members.values() if child.pinned]
                assert parent.num_pinned == len(pinned), "a pinned share is lost"
                waiting = {id(share) for _, _, share in parent.idle}
                for child in parent.members.values():
                    assert child.pinned or id(child) in waiting, "a share is remembered for ever"


def _pass(share: Share, service: float) -> None:
    """Service of a share's children: its own counter and the time of their siblings go on."""
    share.counter += service / share.weight
    if share.num_active:
        share.virtual += service / share.active_weight
    if share.idle and share.idle[0][0] <= share.virtual:
        share.forget_caught_up()
