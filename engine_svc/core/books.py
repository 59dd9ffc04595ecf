"""The core's books: every live request, and the moves that a sequence can make.

All other parts of the core decide; only these moves change who is where, so pages, seats and lanes
cannot drift apart.
"""

from __future__ import annotations

from collections import OrderedDict

from engine_svc.core.lane import Lane
from engine_svc.core.memory import Memory
from engine_svc.core.outputs import Outputs
from engine_svc.core.ring import Ring
from engine_svc.core.sequence import Age, LiveRequest, Sequence, SequenceState
from engine_svc.core.slots import Slot
from engine_svc.core.turns import Turn, Turns
from engine_svc.core.waits import Cause, waits_between
from engine_svc.types import EngineLimits, Failure, PageCopy, WeightsReady


class Books:
    """The state that planning reads and commits write."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.memory = Memory(limits)
        self.outputs = Outputs()
        self.requests: OrderedDict[str, LiveRequest] = OrderedDict()
        self.lanes: dict[str, Lane] = {}
        self.ring = Ring()
        self.turns = Turns(limits.max_loras)
        #: lanes whose weights are neither on the host nor in a slot, in the order of their demand
        self.absent: OrderedDict[str, Lane] = OrderedDict()
        #: packed weights that lie on the host for us until they are in a slot
        self.on_host: dict[str, WeightsReady] = {}
        self.free_seats = list(range(limits.max_num_seqs - 1, -1, -1))
        #: suspended sequences that keep their pages
        self.paused: dict[Age, Sequence] = {}
        #: ended sequences whose pages a launched step still uses
        self.leaving: list[Sequence] = []
        self.deferred = [0] * len(Cause)
        self.num_queued = 0
        self.num_running = 0
        self.num_preempted = 0
        #: id of the step that is planned next
        self.next_step = 0
        #: smoothed seconds from one first-planned request to the next; 0 = none yet
        self.start_interval_s = 0.0
        #: the seat or the pages that the ring's first lacks: kept for it when they come free
        self.lacking: Cause | None = None
        #: sequences that got their seats in the plan being made
        self.opened: dict[Sequence, None] = {}
        #: copies in the plan being made, in the order in which their pages were given
        self.page_copies: list[tuple[Sequence, PageCopy]] = []
        self._last_start_s: float | None = None
        self._orders = 0
        self._queue_events = 0

    @property
    def scarce(self) -> bool:
        """The ring waits for more than a place, so the base's turn can end for it too."""
        return self.lacking is not None or self.memory.kept_pages > 0

    # ---- requests

    def next_order(self) -> int:
        self._orders += 1
        return self._orders - 1

    def end_request(self, live: LiveRequest, failure: Failure | None, now: float) -> None:
        """The request's one RequestEnded; what is left of its sequences enters no later plan."""
        lane = self.lanes[live.digest]
        if live.waits is None:
            self._close_waits(live, lane, now)
        for sequence in live.sequences:
            if sequence.state is not SequenceState.ENDED:
                self.end_sequence(sequence)
        live.ended = True
        del self.requests[live.request.request_id]
        self.outputs.ended(live, failure)
        lane.num_requests -= 1
        self._tidy(lane)

    def end_sequence(self, sequence: Sequence) -> None:
        """The choice has its last token; the request ends with its last choice."""
        lane = sequence.lane
        self._give_seats_back(sequence)
        self.paused.pop(sequence.age, None)
        lane.put(sequence, SequenceState.ENDED)
        if lane.num_deferred == 0:
            self.leave_line(lane)
        sequence.live.discarded_tokens += sequence.num_pending
        if sequence.in_flight:
            self.leaving.append(sequence)
        else:
            self.release_pages(sequence)

    def _close_waits(self, live: LiveRequest, lane: Lane, now: float) -> None:
        live.waits = waits_between(live.arrived, lane.clock.read(now), live.before_s)
        self.num_queued -= 1

    def _tidy(self, lane: Lane) -> None:
        """Forget a lane that nobody asks for; its slot stays."""
        if lane.num_requests == 0:
            turn = self.turns.get(lane.digest)
            if turn is not None:
                self.turns.end(turn)
                self.memory.slots.touch(lane.digest)
            del self.lanes[lane.digest]

    # ---- sequences

    def start(self, sequence: Sequence, now: float) -> None:
        """waiting or suspended → running, with the seats it needs."""
        lane = sequence.lane
        live = sequence.live
        if sequence.state is SequenceState.SUSPENDED and live.waits is not None:
            live.paused_s += now - sequence.suspended_s
        self.paused.pop(sequence.age, None)
        lane.put(sequence, SequenceState.RUNNING)
        self.num_running += 1
        sequence.seats = tuple(self.free_seats.pop() for _ in range(sequence.num_seats_needed))
        sequence.names_tokens = True
        self.opened[sequence] = None

    def first_planned(self, live: LiveRequest, now: float) -> None:
        """A plan has its first chunk: it waits no longer."""
        self._close_waits(live, self.lanes[live.digest], now)
        self._note_start(now)
        live.cached_tokens = live.sequences[0].num_planned
        slot = self.memory.slots.get(live.digest)
        live.load_s = 0.0 if slot is None else slot.load_s

    def fork(self, sequence: Sequence) -> list[Sequence]:
        """The prompt's last chunk is in the plan: one sequence for each choice, the first is the
        one that computed it."""
        live, lane = sequence.live, sequence.lane
        live.forked = True
        seats = sequence.seats
        sequence.seats = seats[:1]
        for choice in range(1, len(seats)):
            other = Sequence(live, lane, choice, sequence.max_total)
            other.page_ids = list(sequence.page_ids)
            self.memory.share(other.page_ids)
            other.seats = seats[choice : choice + 1]
            other.num_planned = other.num_charged = sequence.num_planned
            live.sequences.append(other)
            lane.put(other, SequenceState.RUNNING)
            self.num_running += 1
        return live.sequences

    def pause(self, sequence: Sequence, now: float) -> None:
        """running → suspended: the seat goes, the KV stays."""
        self._give_seats_back(sequence)
        sequence.suspended_s = now
        sequence.lane.put(sequence, SequenceState.SUSPENDED)
        if sequence.page_ids:
            self.paused[sequence.age] = sequence

    def preempt(self, sequence: Sequence, now: float) -> None:
        """running or paused → suspended without pages: everything is computed again."""
        if sequence.state is SequenceState.RUNNING:
            self.pause(sequence, now)
        self.paused.pop(sequence.age, None)
        self.release_pages(sequence)
        self.num_preempted += 1

    def release_pages(self, sequence: Sequence) -> None:
        self.memory.release(sequence.page_ids)
        sequence.forget_pages()

    def _give_seats_back(self, sequence: Sequence) -> None:
        if sequence.state is SequenceState.RUNNING:
            self.num_running -= 1
            self.free_seats.extend(sequence.seats)
            sequence.seats = ()

    def _note_start(self, now: float) -> None:
        if self._last_start_s is not None:
            interval = now - self._last_start_s
            self.start_interval_s += 0.1 * (interval - self.start_interval_s)
        self._last_start_s = now

    # ---- lanes

    def queue(self, lane: Lane, now: float) -> None:
        """The lane's demand begins, or goes to the tail after a turn."""
        lane.queued_at = self._queue_events
        self._queue_events += 1
        self.place_in_line(lane, now)

    def place_in_line(self, lane: Lane, now: float) -> None:
        """Into the ring if the lane could run, else among those whose weights are absent."""
        if lane.is_base or lane.digest in self.on_host or self.memory.slots.get(lane.digest):
            self.ring.add(lane)
            lane.blame(Cause.PLACE, now)
        else:
            self.absent[lane.digest] = lane
            lane.wanted_s = now
            lane.blame(Cause.LOAD, now)

    def leave_line(self, lane: Lane) -> None:
        """Its turn begins, or nothing of it waits any more."""
        if lane.in_ring:
            self.ring.remove(lane)
        self.absent.pop(lane.digest, None)

    def is_in_line(self, lane: Lane) -> bool:
        return lane.in_ring or lane.digest in self.absent or lane.digest in self.turns

    def end_turn(self, turn: Turn, now: float) -> None:
        """The place is free; what still runs is paused, and the lane goes to the tail."""
        lane = turn.lane
        self.turns.end(turn)
        self.memory.slots.touch(lane.digest)
        for sequence in list(lane.running.values()):
            if not sequence.exhausted:
                self.pause(sequence, now)
        if lane.num_deferred:
            self.queue(lane, now)

    def evict_slot(self, slot: Slot, now: float) -> None:
        """The adapter leaves the arena; if somebody waits for it, its weights are absent again."""
        self.memory.evict_slot(slot)
        lane = self.lanes.get(slot.digest)
        if lane is not None and lane.in_ring:
            self.ring.remove(lane)
            self.place_in_line(lane, now)

    def fail_lane(self, lane: Lane, failure: Failure, now: float) -> None:
        """Its adapter cannot be had: all its requests end."""
        for live in [r for r in self.requests.values() if r.digest == lane.digest]:
            self.end_request(live, failure, now)
