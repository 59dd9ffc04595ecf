"""The core's books: every live request, and the moves that a sequence can make.

All other parts of the core decide; only these moves change who is where, so pages, seats and lanes
cannot drift apart.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from engine_svc.core.charges import Charges
from engine_svc.core.decodes import Decodes
from engine_svc.core.flow import Flow
from engine_svc.core.heads import Heads
from engine_svc.core.lane import Lane
from engine_svc.core.limits import resolved_quantum
from engine_svc.core.lines import Lines
from engine_svc.core.memory import Memory
from engine_svc.core.outputs import Outputs
from engine_svc.core.paused import Paused
from engine_svc.core.queue import Queue
from engine_svc.core.rates import Rates
from engine_svc.core.sequence import LiveRequest, Sequence, SequenceState
from engine_svc.core.shares import Ledger
from engine_svc.core.slots import Slot
from engine_svc.core.turns import Turn, Turns
from engine_svc.core.waits import Cause, waits_between
from engine_svc.types import EngineLimits, Failure, FlowKey, PageCopy, WeightsReady


class Books:
    """The state that planning reads and commits write."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.memory = Memory(limits)
        self.outputs = Outputs()
        self.requests: OrderedDict[str, LiveRequest] = OrderedDict()
        self.lanes: dict[str, Lane] = {}
        self.ledger = Ledger(limits.batch_grant_every)
        #: who starts next in the open turns
        self.heads = Heads(self.ledger)
        self.turns = Turns(limits, resolved_quantum(limits))
        self.charges = Charges(limits, self.ledger, self.turns)
        self.queue = Queue()
        self.rates = Rates(limits)
        #: packed weights that lie on the host for us until they are in a slot
        self.on_host: dict[str, WeightsReady] = {}
        self.lines = Lines(limits.batch_grant_every, self.memory, self.turns, self.on_host)
        self.ring, self.loading = self.lines.ring, self.lines.loading
        self.placeless, self.absent = self.lines.placeless, self.lines.absent
        #: adapters that nobody asked for any more since the last plan
        self.abandoned: list[str] = []
        self.free_seats = list(range(limits.max_num_seqs - 1, -1, -1))
        #: who has each seat, or had it last
        self.seated: list[Sequence | None] = [None] * limits.max_num_seqs
        self.decodes = Decodes(limits.max_num_seqs)
        #: decoding sequences by the step that has to look at them
        self.alarms: defaultdict[int, list[Sequence]] = defaultdict(list)
        #: running sequences whose next chunk names its tokens
        self.prompts: dict[Sequence, None] = {}
        #: idle slots of adapters in the ring, the farthest from its turn last, as they were when
        #: somebody last looked for one to give up
        self.far_slots: list[Slot] = []
        #: the adapter of the oldest sequence since all lacked what others keep, until its turn ends
        self.rescued: str | None = None
        #: suspended sequences that keep their pages
        self.paused = Paused()
        #: ended sequences whose pages a launched step still uses
        self.leaving: list[Sequence] = []
        self.deferred = [0] * len(Cause)
        self.num_running = 0
        #: most choices of a request since the books were empty: seats that one grant may need
        self.widest = 1
        self.num_preempted = 0
        #: id of the step that is planned next
        self.next_step = 0
        #: the seat or the pages that the ring's first lacks: kept for it when they come free
        self.lacking: Cause | None = None
        #: sequences that got their seats in the plan being made
        self.opened: dict[Sequence, None] = {}
        #: copies in the plan being made, in the order in which their pages were given
        self.page_copies: list[tuple[Sequence, PageCopy]] = []
        self._orders = 0

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
        self._tidy(live.sequences[0].flow)

    def end_sequence(self, sequence: Sequence) -> None:
        """The choice has its last token; the request ends with its last choice."""
        lane = sequence.lane
        self._give_seats_back(sequence)
        self.paused.discard(sequence)
        lane.put(sequence, SequenceState.ENDED)
        self.lines.settle(sequence.flow, self.next_step)
        sequence.live.discarded_tokens += sequence.num_pending
        if self.in_flight(sequence):
            self.leaving.append(sequence)
        else:
            self.release_pages(sequence)

    def _close_waits(self, live: LiveRequest, lane: Lane, now: float) -> None:
        live.waits = waits_between(live.arrived, lane.clock.read(now), live.before_s)
        self.queue.leave(live.sequences[0].flow, len(live.request.prompt_token_ids))

    def _tidy(self, flow: Flow) -> None:
        """Forget a flow, and a lane, that nobody asks for; the lane's slot stays."""
        flow.num_requests -= 1
        if flow.num_requests:
            return
        lane = flow.lane
        self.ledger.release(flow.share)
        del lane.flows[flow.key]
        lane.unlisted.pop(flow, None)
        if not lane.flows:
            turn = self.turns.get(lane.digest)
            if turn is not None:
                self.turns.end(turn)
                self.lines.note_place(lane)
            if self.rescued == lane.digest:
                self.rescued = None
            self.absent.pop(lane.digest, None)
            self.abandoned.append(lane.digest)
            del self.lanes[lane.digest]

    def flow(self, lane: Lane, key: FlowKey, weight: float) -> Flow:
        """The live flow, which begins now if it is new."""
        flow = lane.flows.get(key)
        if flow is None:
            flow = lane.flows[key] = Flow(key, lane, self.ledger.flow(key, weight))
            if not lane.is_absent:
                flow.share.wake()
        return flow

    # ---- sequences

    def in_flight(self, sequence: Sequence) -> bool:
        """A launched step that it is in has not been committed."""
        return sequence.last_step > self.memory.pool.committed_step

    @property
    def num_decoding(self) -> int:
        return sum([len(turn.lane.decoding) for turn in self.turns.values()])

    def look_at(self, sequence: Sequence, step: int) -> None:
        """A step, this or a later one, has to look at a sequence that decodes."""
        sequence.alarm_step = step
        self.alarms[step].append(sequence)

    def start(self, sequence: Sequence, now: float) -> None:
        """waiting or suspended → running, with the seats it needs."""
        lane = sequence.lane
        live = sequence.live
        if sequence.state is SequenceState.SUSPENDED and live.waits is not None:
            live.paused_s += now - sequence.suspended_s
        self.paused.discard(sequence)
        lane.put(sequence, SequenceState.RUNNING)
        self.lines.leave(sequence.flow)
        self.num_running += 1
        sequence.seats = tuple([self.free_seats.pop() for _ in range(sequence.num_seats_needed)])
        for seat in sequence.seats:
            self.seated[seat] = sequence
        self.opened[sequence] = None

    def first_planned(self, live: LiveRequest, now: float) -> None:
        """A plan has its first chunk: it waits no longer."""
        self._close_waits(live, self.lanes[live.digest], now)
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
            other = Sequence(live, sequence.flow, choice, sequence.max_total)
            other.page_ids = list(sequence.page_ids)
            self.memory.share(other.page_ids)
            other.seats = seats[choice : choice + 1]
            self.seated[seats[choice]] = other
            other.num_planned = other.num_charged = sequence.num_planned
            other.last_step = sequence.last_step
            live.sequences.append(other)
            lane.put(other, SequenceState.RUNNING)
            lane.decode(other)
            self.num_running += 1
        return live.sequences

    def pause(self, sequence: Sequence, now: float) -> None:
        """running → suspended: the seat goes, the KV stays."""
        self._give_seats_back(sequence)
        sequence.suspended_s = now
        self.put_off(sequence, SequenceState.SUSPENDED)
        if sequence.page_ids:
            self.paused.add(sequence)
        self.lines.settle(sequence.flow, self.next_step)

    def put_off(self, sequence: Sequence, state: SequenceState) -> None:
        """It waits from now on."""
        lane = sequence.lane
        lane.put(sequence, state)
        self.heads.note(sequence.flow, lane.digest in self.turns)

    def preempt(self, sequence: Sequence, now: float) -> None:
        """running or paused → suspended without pages: everything is computed again."""
        if sequence.state is SequenceState.RUNNING:
            self.pause(sequence, now)
        self.paused.discard(sequence)
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

    # ---- turns

    def begin_turn(self, flow: Flow, now: float) -> None:
        """The flow's adapter has a place; its first sequence was started."""
        lane = flow.lane
        lane.blame(Cause.BUDGET, now)
        self.turns.begin(flow, self.memory.slots.ready(lane.digest), self.next_step, now)
        self.heads.opened(lane)
        self.lines.note_place(lane)

    def renew_turn(self, flow: Flow, now: float) -> None:
        """The adapter's closing turn ends, and one of this flow begins in its place."""
        self.turns.renew(flow, self.next_step, now)
        self.heads.opened(flow.lane)

    def reopen_turn(self, turn: Turn) -> None:
        """Nobody waits for what it holds: it goes on, and owes nothing for what it was served."""
        turn.spend_freely()
        if turn.closing_since is not None:
            turn.closing_since = None
            self.heads.opened(turn.lane)

    def end_turn(self, turn: Turn, now: float) -> None:
        """The place is free; what still runs is paused, and who was served goes to the tail."""
        lane = turn.lane
        self.turns.end(turn)
        if lane.digest == self.rescued:
            self.rescued = None
        if turn.closing_since is not None:
            self.rates.turn_ended(now - turn.began_s)
        served = {sequence.flow: None for sequence in lane.running.values()}
        for sequence in list(lane.running.values()):
            if not sequence.exhausted:
                self.pause(sequence, now)
        for flow in served:
            if flow.line < 0 and flow.num_deferred:
                self.lines.line_up(flow, self.next_step, now)
        if lane.num_deferred and not lane.is_absent:
            lane.blame(Cause.PLACE, now)
        self.lines.note_place(lane)

    # ---- adapters

    def evict_slot(self, slot: Slot, now: float) -> None:
        """The adapter leaves the arena; if somebody waits for it, its weights are absent again."""
        self.memory.evict_slot(slot)
        lane = self.lanes.get(slot.digest)
        if lane is not None:
            self.lines.note_presence(lane, now)

    def fail_lane(self, lane: Lane, failure: Failure, now: float) -> None:
        """Its adapter cannot be had: all its requests end."""
        for live in [r for r in self.requests.values() if r.digest == lane.digest]:
            self.end_request(live, failure, now)
