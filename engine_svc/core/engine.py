"""The engine's loop, on one page: plan → run → commit.

    submit ─▶ admission ─▶ lane (all requests of one adapter) ─▶ ring ─▶ turn ─▶ step ─▶ outputs

    admission.py  is there room in the queue, could it ever fit, would it wait too long
    shares.py     virtual counters of classes, tenants and flows
    ring.py       whose turn is next: tenants in turn, their flows in turn
    lines.py      who stands in the ring, and who waits for weights
    precedence.py where the ring gives way to the counters
    loads.py      weights: wanted, on the host, filling, in a slot
    places.py     who holds one of max_loras places: turns, closing, pausing
    budget.py     whose tokens go into the step: decodes, then prompts in chunks, by counter
    pressure.py   who gives pages when there are too few
    planner.py    all that in one order, as a draft; build.py makes it a StepPlan
    decodes.py    what decodes in every step, as the columns of its chunks
    commit.py     sampled tokens reach their sequences; what ended gives back pages and seats

With run_ahead 1 a step is planned while the one before it still runs: its tokens stay on the device
and are committed one step later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping

from engine_svc.core import failures
from engine_svc.core.admission import admit, refusal
from engine_svc.core.books import Books
from engine_svc.core.build import LaunchedStep
from engine_svc.core.commit import commit_step, cut_choice
from engine_svc.core.explain import explain
from engine_svc.core.limits import check_limits
from engine_svc.core.loads import Loads
from engine_svc.core.planner import plan_step
from engine_svc.core.ports import Clock, Runner, SlotWriter, WeightsSource
from engine_svc.core.report import StepReport
from engine_svc.core.sequence import Sequence, SequenceState
from engine_svc.core.snapshot import CoreCounts, take_counts
from engine_svc.core.waits import Cause
from engine_svc.snapshots import RequestExplanation
from engine_svc.types import (
    NO_SLOT,
    EngineLimits,
    Failure,
    LateInputs,
    OutputItem,
    Request,
    TenantQuota,
)

_NOTHING_LATE = LateInputs()
_SPARE_DEADLINES = 64


class EngineCore:
    """Serves requests step by step. Single-threaded: the caller passes messages in, then steps."""

    def __init__(
        self,
        limits: EngineLimits,
        runner: Runner,
        slot_writer: SlotWriter,
        weights: WeightsSource,
        clock: Clock,
    ) -> None:
        """Raises: ValueError when `limits` contradict each other."""
        check_limits(limits)
        self._runner = runner
        self._clock = clock
        self._books = Books(limits)
        self._loads = Loads(self._books, weights, slot_writer)
        self._in_flight: deque[LaunchedStep] = deque()
        self._deadlines: list[tuple[float, int, str]] = []
        self._draining = False

    # ---- what frontends ask for

    def submit(self, request: Request) -> None:
        """Admit or refuse; the answer is in the outputs: Admitted, or RequestEnded alone.

        Raises: ValueError when a live request has this id: answers could not be told apart.
        """
        if request.request_id in self._books.requests:
            raise ValueError(f"request_id {request.request_id} is in use")
        now = self._clock.now()
        failure = refusal(self._books, request, now, self._draining)
        if failure is not None:
            tokens = len(request.prompt_token_ids)
            self._books.outputs.refused(request.request_id, tokens, failure)
            return
        live = admit(self._books, request, now)
        if request.deadline_s != float("inf"):
            heapq.heappush(self._deadlines, (request.deadline_s, live.order, request.request_id))
            self._forget_deadlines()

    def cancel(self, request_id: str, failure: Failure | None = None) -> None:
        """End a request, if it still lives, with `failure` or CANCELLED. It enters no later plan;
        its pages come back when the last step launched with it commits."""
        live = self._books.requests.get(request_id)
        if live is not None:
            reason = failure or failures.cancelled(request_id)
            self._books.end_request(live, reason, self._clock.now())

    def stop_choice(self, request_id: str, choice: int, keep_tokens: int) -> None:
        """The frontend found a stop string behind the first `keep_tokens` tokens of a choice.

        No SequenceOutput of this choice follows; RequestEnded does when all choices have ended.
        """
        live = self._books.requests.get(request_id)
        if live is not None:
            cut_choice(self._books, live, choice, keep_tokens, self._clock.now())

    def set_shares(
        self, tenant_weights: Mapping[str, float], adapter_weights: Mapping[str, float]
    ) -> None:
        """Weights from now on, by tenant and by digest; what is not named keeps 1, or the weight
        of its AdapterRef. Raises: ValueError naming a weight that is not above 0."""
        self._books.ledger.set_weights(tenant_weights, adapter_weights)

    def set_quotas(self, quotas: Mapping[str, TenantQuota]) -> None:
        """Queue limits from now on; tenants that are not named have none of their own.

        Raises: ValueError naming a limit below 0.
        """
        self._books.queue.set_quotas(quotas)

    def explain(self, request_id: str) -> RequestExplanation | None:
        """Why an open request waits, by our id or its client's; None: there is none."""
        return explain(self._books, request_id, self._clock.now())

    def drain(self) -> None:
        """Refuse new requests from now on; what was admitted goes on."""
        self._draining = True

    def take_outputs(self) -> tuple[OutputItem, ...]:
        """What happened since the last call, in order."""
        return self._books.outputs.take()

    def snapshot(self) -> CoreCounts:
        return take_counts(self._books, self._loads, self._clock.now(), self._draining)

    @property
    def num_live(self) -> int:
        """Requests without their RequestEnded."""
        return len(self._books.requests)

    # ---- the loop

    def step(self) -> StepReport:
        """One plan–run–commit. Without anything to plan it commits what still runs."""
        began = self._clock.now()
        self._expire(began)
        self._loads.poll(began)
        planned = plan_step(self._books, self._loads, began, len(self._in_flight))
        plan_s = self._clock.now() - began
        if planned is not None:
            self._runner.forward(planned.plan)
            self._runner.sample(planned.plan, _NOTHING_LATE)
            self._in_flight.append(planned)
        compute_s, commit_s, committed = 0.0, 0.0, False
        ahead = self._books.limits.run_ahead if planned is not None else 0
        while len(self._in_flight) > ahead:
            launched = self._in_flight.popleft()
            result = self._runner.collect(launched.plan.step)
            now = self._clock.now()
            commit_step(self._books, launched, result, now)
            commit_s += self._clock.now() - now
            compute_s += result.compute_s
            committed = True
        return self._report(planned, plan_s, compute_s, commit_s, committed)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order, request_id = heapq.heappop(self._deadlines)
            live = self._books.requests.get(request_id)
            if live is not None and live.order == order:
                self._books.end_request(live, failures.deadline_exceeded(request_id), now)

    def _forget_deadlines(self) -> None:
        """Deadlines may lie hours away: those of requests that ended must not pile up."""
        requests = self._books.requests
        if len(self._deadlines) > 2 * len(requests) + _SPARE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in requests]
            heapq.heapify(self._deadlines)

    def _report(
        self,
        planned: LaunchedStep | None,
        plan_s: float,
        compute_s: float,
        commit_s: float,
        committed: bool,
    ) -> StepReport:
        books = self._books
        plan = None if planned is None else planned.plan
        num_sequences = 0 if plan is None else len(plan.chunks)
        segments = {} if plan is None else plan.chunks.tokens_by_slot()
        return StepReport(
            step=-1 if plan is None else plan.step,
            num_tokens=sum(segments.values()),
            num_sequences=num_sequences,
            fill=num_sequences / books.limits.max_num_seqs,
            num_adapters=len(segments.keys() - {NO_SLOT}),
            segments=tuple(segments.values()),
            plan_s=plan_s,
            compute_s=compute_s,
            commit_s=commit_s,
            deferred=tuple((Cause(i), n) for i, n in enumerate(books.deferred) if n),
            waiting=sum(books.deferred),
            running=books.num_running,
            idle=plan is None and not committed,
        )

    def check_integrity(self) -> None:
        """Raises: AssertionError when the books contradict each other."""
        books = self._books
        sequences = [s for live in books.requests.values() for s in live.sequences]
        holders = {id(s): s for s in [*sequences, *books.leaving]}.values()
        books.memory.check_integrity(s.page_ids for s in holders)
        books.ring.check_integrity()
        books.loading.check_integrity()
        books.ledger.check_integrity()
        books.turns.check_integrity()
        books.decodes.check_integrity()
        assert books.decodes.step == books.next_step, "decodes are out of step"
        seats = [seat for s in sequences for seat in s.seats] + books.free_seats
        assert sorted(seats) == list(range(books.limits.max_num_seqs)), "a seat is lost"
        for lane in books.lanes.values():
            lane.check_integrity()
            turn = books.turns.get(lane.digest)
            is_open = turn is not None and turn.closing_since is None
            books.heads.check_integrity(lane, is_open)
            books.lines.check_integrity(lane)
            for sequence in lane.decoding:
                self._check_alarm(sequence)
        assert sum(books.deferred) == sum(lane.num_deferred for lane in books.lanes.values())
        running = [s for s in sequences if s.state is SequenceState.RUNNING]
        assert books.num_running == len(running)
        paused = {s.age for s in sequences if s.state is SequenceState.SUSPENDED and s.page_ids}
        assert paused == books.paused.ages(), "paused sequences are out of the books"
        queued = [r.request for r in books.requests.values() if r.waits is None]
        books.queue.check_integrity([(r.flow.tenant, len(r.prompt_token_ids)) for r in queued])
        if not books.requests and not self._in_flight:
            assert not books.leaving, "an ended sequence keeps its pages"

    def _check_alarm(self, sequence: Sequence) -> None:
        """It is looked at before its page is full and before it ends."""
        books = self._books
        assert sequence in books.alarms.get(sequence.alarm_step, ()), "a decode is not looked at"
        steps = sequence.alarm_step - books.next_step
        room = len(sequence.page_ids) * books.limits.page_size
        assert steps >= 0
        assert steps == 0 or sequence.num_planned + steps <= min(room, sequence.max_total - 2)
