"""A lane: all requests for one adapter (or the base), of whatever tenant and class."""

from __future__ import annotations

from collections.abc import Iterator

from engine_svc.core.flow import Flow
from engine_svc.core.sequence import Age, Sequence, SequenceState
from engine_svc.core.waits import Cause, WaitClock
from engine_svc.types import BASE_DIGEST, AdapterRef, FlowKey


class Lane:
    """The flows of one adapter, its running sequences, and what the others wait for."""

    def __init__(
        self,
        ref: AdapterRef | None,
        max_total: int,
        cause: Cause,
        now: float,
        deferred: list[int],
        prompts: dict[Sequence, None],
    ) -> None:
        self.ref = ref
        self.digest = BASE_DIGEST if ref is None else ref.digest
        self.is_base = self.digest == BASE_DIGEST
        self.clock = WaitClock(cause, now)
        self.flows: dict[FlowKey, Flow] = {}
        self.running: dict[Age, Sequence] = {}
        #: of those, what decodes and has not planned its last token: in each step, if it has pages
        self.decoding: dict[Sequence, None] = {}
        #: how many of each flow are among the decodes of the step
        self.rows: dict[Flow, int] = {}
        #: of those, the ones whose next chunk names its tokens; listed over all lanes in `_prompts`
        self.num_prompts = 0
        self.num_deferred = 0
        #: its flows that stand in the ring
        self.num_in_ring = 0
        #: its weights are neither on the host nor in a slot
        self.is_absent = False
        self.wanted_s = now
        #: tokens that a sequence may have, once the adapter's size is known
        self.max_total = max_total
        #: sequences that wait, by cause, over all lanes; shared
        self._deferred = deferred
        #: running sequences whose next chunk names its tokens, over all lanes; shared
        self._prompts = prompts
        #: flows with somebody who waits that are not among the heads of open turns
        self.unlisted: dict[Flow, None] = {}

    @property
    def has_work(self) -> bool:
        """Something that holds seats has more to compute."""
        return bool(self.decoding or self.num_prompts)

    def blame(self, cause: Cause, now: float) -> None:
        """What waits here waits for `cause` from now on."""
        if cause is not self.clock.cause:
            self._deferred[self.clock.cause] -= self.num_deferred
            self._deferred[cause] += self.num_deferred
            self.clock.turn(cause, now)

    def deferred(self) -> Iterator[Sequence]:
        """Everybody who waits, flow by flow."""
        for flow in self.flows.values():
            yield from flow.suspended
            yield from flow.waiting.values()

    def put(self, sequence: Sequence, state: SequenceState) -> None:
        """Move a sequence into a state."""
        self._take(sequence)
        sequence.state = state
        flow = sequence.flow
        if state is SequenceState.RUNNING:
            self.running[sequence.age] = sequence
            flow.num_running += 1
            if sequence.names_tokens:
                self._prompts[sequence] = None
                self.num_prompts += 1
            else:
                self.decoding[sequence] = None
            return
        if state is SequenceState.ENDED:
            return
        self.num_deferred += 1
        self._deferred[self.clock.cause] += 1
        if state is SequenceState.WAITING:
            flow.waiting[sequence.age] = sequence
        else:
            flow.suspend(sequence)

    def decode(self, sequence: Sequence) -> None:
        """Its last named token is in the plan: from now on the seat holds the last one."""
        self._leave_prompts(sequence)
        sequence.names_tokens = False
        if not sequence.exhausted:
            self.decoding[sequence] = None

    def stop_decoding(self, sequence: Sequence) -> None:
        """It computes no position by itself from now on."""
        if sequence.decodes is not None:
            sequence.decodes.leave(sequence)
        self.decoding.pop(sequence, None)

    def _leave_prompts(self, sequence: Sequence) -> None:
        del self._prompts[sequence]
        self.num_prompts -= 1

    def _take(self, sequence: Sequence) -> None:
        flow = sequence.flow
        if self.running.pop(sequence.age, None) is not None:
            flow.num_running -= 1
            if sequence in self._prompts:
                self._leave_prompts(sequence)
            self.stop_decoding(sequence)
            sequence.stop_decoding()
            return
        if sequence.state is SequenceState.SUSPENDED:
            flow.suspended.remove(sequence)
        elif flow.waiting.pop(sequence.age, None) is None:
            return
        self.num_deferred -= 1
        self._deferred[self.clock.cause] -= 1

    def check_integrity(self) -> None:
        for state, members in (
            (SequenceState.WAITING, [s for f in self.flows.values() for s in f.waiting.values()]),
            (SequenceState.RUNNING, list(self.running.values())),
            (SequenceState.SUSPENDED, [s for f in self.flows.values() for s in f.suspended]),
        ):
            for sequence in members:
                assert sequence.state is state
                assert sequence.flow.lane is self
                assert bool(sequence.seats) is (state is SequenceState.RUNNING)
        prompts = [s for s in self.running.values() if s.names_tokens]
        assert self.num_prompts == len(prompts), "a prompt is lost"
        assert all(s in self._prompts for s in prompts)
        decoding = {s for s in self.running.values() if not (s.names_tokens or s.exhausted)}
        assert self.decoding.keys() == decoding, "a sequence that decodes is lost"
        assert self.num_deferred == sum(flow.num_deferred for flow in self.flows.values())
        for flow in self.flows.values():
            ages = [sequence.age for sequence in flow.suspended]
            assert ages == sorted(ages), "suspended sequences are out of order"
            assert flow.num_running == sum(s.flow is flow for s in self.running.values())
            assert flow.share.is_active is not self.is_absent, "an absent adapter's counter runs"
