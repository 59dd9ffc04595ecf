"""Adapter weights on their way: absent → wanted from the loader → on the host → filling → a slot.

At most max_wanted adapters are asked for or lie on the host for us, in the order of their demand;
the first few of the ring are copied into slots before their turn. A failure ends the adapter's own
requests and nothing else; the next request tries again.
"""

from __future__ import annotations

from engine_svc.core import failures
from engine_svc.core.books import Books
from engine_svc.core.lane import Lane
from engine_svc.core.limits import arena_tokens
from engine_svc.core.ports import SlotWriter, WeightsSource
from engine_svc.core.pressure import make_room_for_load
from engine_svc.core.slots import SlotState
from engine_svc.core.waits import Cause
from engine_svc.types import Failure, SlotLoad, WeightsFailed, WeightsReady


class Loads:
    """Talks to the loader and to the slot writer; neither ever blocks."""

    def __init__(self, books: Books, source: WeightsSource, writer: SlotWriter) -> None:
        self._books = books
        self._source = source
        self._writer = writer
        #: digests asked for and not answered yet, in the order of demand
        self._asked: dict[str, float] = {}
        self.num_filling = 0

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    def poll(self, now: float) -> None:
        """Take in what ended since the last step."""
        answers = self._source.poll()
        for answer in answers:
            self._asked.pop(answer.digest, None)
            if isinstance(answer, WeightsFailed):
                self._failed(answer.digest, answer.failure, now)
            else:
                self._arrived(answer, now)
        for load, failure in self._writer.poll():
            self._filled(load, failure, now)
        if answers:
            self._rank()

    def advance(self, now: float) -> None:
        """Ask for the next adapters and fill slots for the first of the ring."""
        books = self._books
        books.memory.kept_pages = 0
        if books.absent:
            self._ask(now)
        if books.abandoned:
            self._forget_unwanted()
        if books.on_host:
            self._prefetch(now)

    def _prefetch(self, now: float) -> None:
        """Copies for the first of the ring, in its order: what comes free is kept for the first
        that lacks it. Urgent are the ring's head, whoever's place is free or closing, and a quarter
        of the places more: turns may end without closing."""
        books = self._books
        slots, ahead = books.memory.slots, set[str]()
        for flow in books.ring.first(1 + books.limits.prefetch_adapters):
            lane = flow.lane
            lacks = lane.digest in books.on_host and not slots.get(lane.digest)
            if lacks and not self._try_fill(lane, ahead, len(ahead) < self._num_urgent(), now):
                return
            ahead.add(lane.digest)

    def _num_urgent(self) -> int:
        turns = self._books.turns
        closing = sum([turn.closing_since is not None for turn in turns.values()])
        return 1 + turns.num_free_places + closing + self._books.limits.max_loras // 4

    def try_fill_now(self, lane: Lane, now: float) -> bool:
        """Start a copy whatever the ring says; False when its weights are not on the host."""
        books = self._books
        if lane.digest not in books.on_host or books.memory.slots.get(lane.digest):
            return False
        return self._try_fill(lane, set(), True, now)

    def ask_now(self, lane: Lane, now: float) -> None:
        """Ask for an adapter whose oldest sequence keeps pages that all others lack; if too many
        are wanted already, one that has no slot yet leaves the host for it."""
        books = self._books
        if lane.digest in self._asked or lane.ref is None:
            return
        if len(self._asked) + len(books.on_host) >= books.limits.max_wanted:
            waiting = [d for d in books.on_host if not books.memory.slots.get(d)]
            if not waiting:
                return
            self._drop(waiting[-1])
            books.lines.note_presence(books.lanes[waiting[-1]], now)
        self._source.want(lane.ref, 0)
        self._asked[lane.digest] = now

    def _ask(self, now: float) -> None:
        books = self._books
        room = books.limits.max_wanted - len(self._asked) - len(books.on_host)
        if room <= 0:
            return
        for flow in books.loading.first(len(self._asked) + room):
            lane = flow.lane
            if room <= 0:
                return
            if lane.digest in self._asked:
                continue
            assert lane.ref is not None
            self._source.want(lane.ref, len(self._asked))
            self._asked[lane.digest] = now
            books.lines.asked(flow)
            room -= 1

    def _rank(self) -> None:
        """What is still outstanding has moved up."""
        for rank, digest in enumerate(self._asked):
            lane = self._books.lanes.get(digest)
            if lane is not None and lane.ref is not None:
                self._source.want(lane.ref, rank)

    def _forget_unwanted(self) -> None:
        books = self._books
        for digest in books.abandoned:
            gone = digest not in books.lanes and not books.memory.slots.get(digest)
            if gone and digest in books.on_host:
                self._drop(digest)
        books.abandoned.clear()

    def _drop(self, digest: str) -> None:
        del self._books.on_host[digest]
        self._source.drop(digest)

    def _arrived(self, weights: WeightsReady, now: float) -> None:
        books = self._books
        books.on_host[weights.digest] = weights
        lane = books.lanes.get(weights.digest)
        if lane is None:
            self._drop(weights.digest)
            return
        assert lane.ref is not None
        limit = books.limits.num_pages - 1
        if weights.num_pages > limit:
            self._drop(weights.digest)
            too_large = failures.adapter_too_large(lane.ref, weights.num_pages, limit)
            self._failed(weights.digest, too_large, now)
            return
        self._bound_requests(lane, weights.num_pages, now)
        if lane.is_absent:
            books.lines.note_presence(lane, now)

    def _bound_requests(self, lane: Lane, num_pages: int, now: float) -> None:
        """Now that the adapter's size is known, refuse prompts that cannot fit beside it."""
        lane.max_total = min(
            self._books.limits.context_tokens, arena_tokens(self._books.limits, num_pages)
        )
        for sequence in list(lane.deferred()):
            sequence.max_total = min(sequence.max_total, lane.max_total)
            tokens = len(sequence.live.request.prompt_token_ids)
            if tokens >= lane.max_total and not sequence.live.ended:
                failure = failures.prompt_too_long(
                    tokens, lane.max_total - 1, "the arena holds no more beside the adapter"
                )
                self._books.end_request(sequence.live, failure, now)

    def _try_fill(self, lane: Lane, ahead: set[str], urgent: bool, now: float) -> bool:
        """Start a copy; adapters `ahead` in the ring keep their slots. False: it lacks room."""
        books = self._books
        weights = books.on_host[lane.digest]
        pages = None
        if make_room_for_load(books, lane, weights.num_pages, ahead, urgent, now):
            pages = books.memory.try_take_settled(weights.num_pages)
        if pages is None:
            if not ahead:
                books.memory.kept_pages = weights.num_pages
                lane.blame(Cause.BYTES, now)
            return False
        assert lane.ref is not None
        slot = books.memory.slots.fill(lane.ref, pages, weights, lane.wanted_s, now)
        self.num_filling += 1
        self._writer.start(SlotLoad(slot.index, slot.digest, weights.span, pages))
        return True

    def _filled(self, load: SlotLoad, failure: Failure | None, now: float) -> None:
        books = self._books
        slot = books.memory.slots.get(load.digest)
        assert slot is not None, f"{load.digest} has no slot to fill"
        assert slot.state is SlotState.FILLING, f"{load.digest} was filled twice"
        self.num_filling -= 1
        self._drop(load.digest)
        if failure is not None:
            books.memory.slots.remove(slot)
            books.memory.release(slot.page_ids)
            self._failed(load.digest, failure, now)
            return
        slot.state = SlotState.READY
        slot.load_s = now - slot.wanted_s
        rates = books.rates
        rates.longest_copy_s = max(rates.longest_copy_s, now - slot.copied_from_s)
        books.lines.note_slot(load.digest, books.lanes.get(load.digest))

    def _failed(self, digest: str, failure: Failure, now: float) -> None:
        lane = self._books.lanes.get(digest)
        if lane is not None:
            self._books.fail_lane(lane, failure, now)
