"""DESIGN's promises about waiting, checked after every step with N, k, M and T as the core has
them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine_svc.core.books import Books
from engine_svc.core.flow import Flow
from engine_svc.core.limits import longest_turn
from engine_svc.core.lines import RING
from engine_svc.core.ring import Ring
from engine_svc.core.waits import Cause
from engine_svc.types import FlowKey, ServiceClass


@dataclass
class Stay:
    """A flow's time in the ring: its place among its tenant's flows when it came, the most tenants
    of its class since, and the steps that count against the bound."""

    number: int
    num_tenants: int
    both_classes: bool
    steps: int = 0
    #: steps while the arena lacked pages; the oldest sequence keeps its own, so no place helps
    steps_without_pages: int = 0


class WaitWatch:
    """Invariant 1: a flow that is k-th of its tenant, among N tenants, is planned within
    ⌈N·k/M⌉·T steps, M the places that have seats; one turn more if a place went by while its bytes
    were being copied; class batch b times and class interactive b/(b − 1) times that, while both
    demand."""

    def __init__(self, copy_steps: int = 0) -> None:
        #: steps that a copy into a slot takes at most
        self.copy_steps = copy_steps
        self.stays: dict[tuple[FlowKey, int], Stay] = {}
        #: most seats that a sequence needed: a place is of no use without them
        self.widest = 1
        #: longest stay ÷ bound, over all stays
        self.closest = 0.0
        self.num_stays = 0

    def look(self, books: Books, num_steps: int = 1) -> None:
        """After a step."""
        tenants = tenants_in(books.ring)
        both = all(tenants.values())
        rescued = any(turn.is_rescue for turn in books.turns)
        lacks_pages = rescued or books.lacking is Cause.PAGES or books.memory.kept_pages > 0
        for live in books.requests.values():
            self.widest = max(self.widest, live.request.sampling.n)
        present = set()
        for flow in books.ring:
            key = (flow.key, flow.queued_at)
            present.add(key)
            count = len(tenants[flow.key.service_class])
            stay = self.stays.get(key)
            if stay is None:
                self.num_stays += 1
                stay = self.stays[key] = Stay(place_among_own(books, flow), count, both)
            stay.num_tenants = max(stay.num_tenants, count)
            stay.both_classes |= both
            if lacks_pages:
                stay.steps_without_pages += num_steps
            else:
                stay.steps += num_steps
            bound = self.bound(books, flow, stay)
            self.closest = max(self.closest, stay.steps / bound)
            assert stay.steps <= bound, f"{flow.key} waits for {stay.steps} steps, bound {bound}"
        for key in self.stays.keys() - present:
            del self.stays[key]

    def bound(self, books: Books, flow: Flow, stay: Stay) -> int:
        limits = books.limits
        grants = stay.number * stay.num_tenants
        if stay.both_classes:
            every = limits.batch_grant_every
            is_batch = flow.key.service_class is ServiceClass.BATCH
            grants = grants * every if is_batch else math.ceil(grants * every / (every - 1))
        places = max(1, min(limits.max_loras, limits.max_num_seqs // self.widest))
        rounds = math.ceil(grants / places) + bool(self.copy_steps)
        return rounds * (longest_turn(limits) + self.copy_steps)


def tenants_in(ring: Ring) -> dict[ServiceClass, set[str]]:
    found: dict[ServiceClass, set[str]] = {c: set() for c in ServiceClass}
    for flow in ring:
        found[flow.key.service_class].add(flow.key.tenant)
    return found


def place_among_own(books: Books, flow: Flow) -> int:
    """k: 1 for the first flow of its tenant and class."""
    own = [f for f in books.ring if f.account is flow.account]
    assert flow.line == RING
    return 1 + sum(f.queued_at < flow.queued_at for f in own)
