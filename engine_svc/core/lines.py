"""Who stands in line: the ring of those who demand a place, and the queue of those who load.

A flow that waits and of which nothing runs in a turn stands in exactly one of them, and keeps its
time when its adapter's weights come or go. What follows from the lines is kept here too: adapters
without a place, adapters without weights, and which idle slots somebody waits for.
"""

from __future__ import annotations

from engine_svc.core.flow import Flow
from engine_svc.core.lane import Lane
from engine_svc.core.memory import Memory
from engine_svc.core.ring import Ring
from engine_svc.core.turns import Turns
from engine_svc.core.waits import Cause
from engine_svc.types import WeightsReady

#: the two lines that a flow may stand in
RING, LOADING = 0, 1


class Lines:
    """The ring, the queue of loads, and what they mean for places and slots."""

    def __init__(
        self,
        batch_grant_every: int,
        memory: Memory,
        turns: Turns,
        on_host: dict[str, WeightsReady],
    ) -> None:
        #: flows that demand a place, and those whose weights are neither on the host nor in a slot
        self.ring = Ring(RING, batch_grant_every)
        self.loading = Ring(LOADING, batch_grant_every)
        #: adapters in the ring without a place
        self.placeless: dict[str, Lane] = {}
        #: lanes that wait for their weights
        self.absent: dict[str, Lane] = {}
        self._memory = memory
        self._turns = turns
        self._on_host = on_host
        self._events = 0

    def line_up(self, flow: Flow, step: int, now: float) -> None:
        """The flow's demand begins, or it goes to the tail after a turn."""
        flow.queued_at, flow.queued_step = self._next_event(), step
        self._place_in_line(flow, now)

    def settle(self, flow: Flow, step: int) -> None:
        """A sequence of the flow ended or was stopped. A flow that waits and of which nothing runs
        stands in a line, also while another flow's turn has its adapter in a place."""
        if not flow.num_deferred:
            self.leave(flow)
        elif flow.line < 0 and not flow.num_running and flow.lane.digest in self._turns:
            flow.queued_at, flow.queued_step = self._next_event(), step
            self.ring.add(flow)
            flow.lane.num_in_ring += 1

    def leave(self, flow: Flow) -> None:
        """It has what it stood for, or nothing of it waits any more."""
        if flow.line == RING:
            self.ring.remove(flow)
            flow.lane.num_in_ring -= 1
            self.note_place(flow.lane)
        elif flow.line == LOADING:
            self.loading.remove(flow)

    def granted(self, flow: Flow) -> None:
        """The flow had a grant of the ring."""
        self.ring.granted(flow, self._next_event())

    def asked(self, flow: Flow) -> None:
        """The flow's adapter was asked for."""
        self.loading.granted(flow, self._next_event())

    def _place_in_line(self, flow: Flow, now: float) -> None:
        lane = flow.lane
        if lane.is_absent:
            self.loading.add(flow)
            lane.blame(Cause.LOAD, now)
            return
        self.ring.add(flow)
        lane.num_in_ring += 1
        if lane.digest not in self._turns:
            lane.blame(Cause.PLACE, now)
        self.note_place(lane)

    def _next_event(self) -> int:
        self._events += 1
        return self._events - 1

    # ---- what the lines mean for places and slots

    def note_presence(self, lane: Lane, now: float) -> None:
        """The lane's weights came or went: its flows change the line, and keep their time."""
        digest = lane.digest
        lane.is_absent = not (
            lane.is_base or digest in self._on_host or self._memory.slots.get(digest)
        )
        if lane.is_absent:
            self.absent[digest] = lane
            lane.wanted_s = now
        else:
            self.absent.pop(digest, None)
        for flow in lane.flows.values():
            if flow.line >= 0:
                self.leave(flow)
                self._place_in_line(flow, now)
            if lane.is_absent:
                flow.share.rest()
            else:
                flow.share.wake()
        self.note_place(lane)

    def note_place(self, lane: Lane) -> None:
        """The lane's place or its demand for one came or went."""
        if lane.is_base:
            return
        digest, has_turn = lane.digest, lane.digest in self._turns
        if lane.num_in_ring and not has_turn:
            self.placeless[digest] = lane
        else:
            self.placeless.pop(digest, None)
        self._memory.slots.note(digest, has_turn, lane.num_in_ring > 0)

    def note_slot(self, digest: str, lane: Lane | None) -> None:
        """The adapter's slot is ready; its lane, if somebody still asks for it."""
        is_wanted = lane is not None and lane.num_in_ring > 0
        self._memory.slots.note(digest, digest in self._turns, is_wanted)

    def check_integrity(self, lane: Lane) -> None:
        """Raises: AssertionError when somebody waits for nothing, or stands for nobody."""
        has_turn = lane.digest in self._turns
        for flow in lane.flows.values():
            served = bool(flow.num_running) and has_turn
            assert flow.line >= 0 or served or not flow.num_deferred, f"{flow.key} is forgotten"
            assert flow.line < 0 or flow.num_deferred, f"{flow.key} stands for nobody"
            assert flow.line < 0 or flow.line == (LOADING if lane.is_absent else RING)
        assert lane.num_in_ring == sum(f.line == RING for f in lane.flows.values())
        lacks = lane.num_in_ring > 0 and not lane.is_base and not has_turn
        assert lacks is (lane.digest in self.placeless)
        slots = self._memory.slots
        if slots.ready(lane.digest) is not None:
            assert lacks is (lane.digest in slots.wanted), "a slot's demand is lost"
            assert (lacks or has_turn) is (lane.digest not in slots.unwanted)
