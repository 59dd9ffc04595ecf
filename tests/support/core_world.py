"""A core among fakes, and the checks that hold after every step whatever happens to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine_svc.core.engine import EngineCore
from engine_svc.core.flow import Flow
from engine_svc.core.lane import Lane
from engine_svc.core.report import StepReport
from engine_svc.core.turns import Turn
from engine_svc.types import (
    BASE_DIGEST,
    AdapterRef,
    Admitted,
    EngineLimits,
    FinishReason,
    FlowKey,
    Request,
    RequestEnded,
    SamplingParams,
    SequenceOutput,
    ServiceClass,
    StepPlan,
)
from tests.support.core_fakes import FakeArena, FakeClock, FakeRunner, FakeWeights, FakeWriter
from tests.support.core_fakes import next_token as fake_next_token
from tests.support.core_gap import GapWatch
from tests.support.core_invariants import WaitWatch
from tests.support.core_kv import ChargeWatch, VictimWatch
from tests.support.core_queue import AdmissionWatch


def limits(**changes: object) -> EngineLimits:
    values: dict[str, object] = {
        "max_loras": 2, "max_num_seqs": 4, "max_num_batched_tokens": 16, "num_pages": 64,
        "page_size": 4, "page_bytes": 1024, "num_slots": 4, "context_tokens": 64,
        "quantum": 16, "turn_max_steps": 12, "closing_steps": 3, "min_chunk": 4,
    }  # fmt: skip
    return EngineLimits(**{**values, **changes})  # type: ignore[arg-type]


def adapter(name: str, weight: float = 1.0) -> AdapterRef:
    return AdapterRef(name, 1, f"sha256:{name}", weight=weight)


@dataclass
class Heard:
    """What a client of one request heard."""

    request: Request
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    stop_ids: dict[int, int] = field(default_factory=dict)
    admitted: bool = False
    ended: RequestEnded | None = None
    ended_step: int = -1
    planned_s: float | None = None
    #: choice → tokens that the frontend kept
    cut: dict[int, int] = field(default_factory=dict)


class World:
    """Submits, steps, listens, checks."""

    def __init__(self, engine_limits: EngineLimits, adapter_pages: int = 2) -> None:
        self.limits = engine_limits
        self.adapter_pages = adapter_pages
        self.clock = FakeClock()
        self.arena = FakeArena(engine_limits.page_size)
        self.runner = FakeRunner(engine_limits, self.arena, self.clock)
        self.writer = FakeWriter(self.arena, self.runner)
        self.weights = FakeWeights(lambda digest: self.adapter_pages)
        self.core = EngineCore(engine_limits, self.runner, self.writer, self.weights, self.clock)
        self.runner.on_forward = self._check_work_conserved
        self.heard: dict[str, Heard] = {}
        self.reports: list[StepReport] = []
        #: checks the bound of every wait for a place
        self.watch: WaitWatch | None = None
        #: checks the gap between those who demand throughout
        self.gap: GapWatch | None = None
        books = self.core._books
        self.victims = VictimWatch(books)
        self.charges = ChargeWatch(books, engine_limits)
        self.admission = AdmissionWatch(engine_limits, books)
        self._seeds: dict[int, Heard] = {}
        #: adapters whose turns ended in this step, before or behind its grants
        self._ended: set[str] = set()
        #: counters at the beginning of the step
        self._levels: dict[Flow, tuple[float, float, float]] = {}
        self._note_ended_turns()

    def submit(
        self,
        prompt: tuple[int, ...] | int,
        ref: AdapterRef | None = None,
        *,
        max_tokens: int = 4,
        deadline_s: float = math.inf,
        tenant: str = "default",
        service_class: ServiceClass = ServiceClass.INTERACTIVE,
        salt: str = "",
        age_s: float = 0.0,
        **sampling: object,
    ) -> Heard:
        number = len(self.heard)
        if isinstance(prompt, int):
            prompt = tuple((number * 7 + i) % 40 for i in range(prompt))
        digest = BASE_DIGEST if ref is None else ref.digest
        request = Request(
            f"r{number}",
            FlowKey(service_class, tenant, digest),
            prompt,
            SamplingParams(max_tokens, seed=number, **sampling),  # type: ignore[arg-type]
            self.clock.now() - age_s,
            ref,
            deadline_s,
            salt,
        )
        heard = self.heard[request.request_id] = self._seeds[number] = Heard(request)
        expected = self.admission.expected(
            request, self.adapter_pages, self.clock.now(), self.core._draining
        )
        self.core.submit(request)
        self._listen()
        failure = None if heard.admitted or heard.ended is None else heard.ended.failure
        self.admission.answered(request, expected, failure)
        if self.gap is not None:
            self.gap.submitted(request)
        return heard

    def step(self, seconds: float = 0.01) -> StepReport:
        began, launched = self.clock.now(), len(self.runner.plans)
        self._ended.clear()
        self._levels = {flow: flow.level for flow in self._flows()}
        report = self.core.step()
        for plan in self.runner.plans[launched:]:
            self.charges.planned(plan, lambda seed: self._seeds[seed].request)
            for opening in plan.seat_openings:
                heard = self._seeds[opening.sampling.seed]
                if heard.planned_s is None:
                    heard.planned_s = began
                    self.admission.queued.pop(heard.request.request_id, None)
        self.charges.check()
        self.core.check_integrity()
        self._check_idle(report)
        if self.watch is not None:
            self.watch.look(self.core._books)
        if self.gap is not None:
            self.gap.look(self.core._books)
        self._listen()
        self.reports.append(report)
        self.clock.advance(seconds)
        return report

    def run(self, max_steps: int = 2000) -> None:
        """Step until every request has ended and nothing is in flight."""
        for _ in range(max_steps):
            idle = self.step().idle
            if idle and not self.core.num_live and not self.core.snapshot().loading_adapters:
                self.check_at_rest()
                return
        living = [h.request for h in self.heard.values() if h.ended is None]
        raise AssertionError(f"after {max_steps} steps still alive: {living}")

    def cancel(self, request_id: str) -> None:
        self.core.cancel(request_id)
        self._listen()

    def cut(self, heard: Heard, choice: int, keep: int) -> None:
        if heard.ended is None:
            heard.cut[choice] = min(keep, heard.cut.get(choice, keep))
        self.core.stop_choice(heard.request.request_id, choice, keep)
        self._listen()

    def _listen(self) -> None:
        for item in self.core.take_outputs():
            heard = self.heard[item.request_id]
            assert heard.ended is None, "something came after the end"
            if isinstance(item, Admitted):
                assert not heard.admitted
                heard.admitted = True
            elif isinstance(item, SequenceOutput):
                assert heard.admitted
                assert item.choice not in heard.reasons
                assert item.choice not in heard.cut
                heard.tokens.setdefault(item.choice, []).extend(item.token_ids)
                if item.finish_reason is not None:
                    heard.reasons[item.choice] = item.finish_reason
                    heard.stop_ids[item.choice] = item.stop_token_id
            else:
                heard.ended, heard.ended_step = item, self.core._books.next_step
                self.admission.queued.pop(item.request_id, None)
                self.check_answer(heard)

    def check_answer(self, heard: Heard) -> None:
        """The answer is what the pure function gives, and the counts fit it."""
        ended, request = heard.ended, heard.request
        assert ended is not None
        for choice in range(request.sampling.n):
            tokens = heard.tokens.get(choice, [])
            expected, reason, stop_id = self.expected(request, choice)
            assert tokens == expected[: len(tokens)]
            if ended.failure is None and choice not in heard.cut:
                assert tokens == expected
                assert (heard.reasons[choice], heard.stop_ids[choice]) == (reason, stop_id)
        stats = ended.stats
        assert stats.prompt_tokens == len(request.prompt_token_ids)
        kept = sum(
            min(len(tokens), heard.cut.get(choice, len(tokens)))
            for choice, tokens in heard.tokens.items()
        )
        assert stats.completion_tokens == kept
        assert 0 <= stats.cached_tokens < max(1, stats.prompt_tokens)
        if heard.admitted:
            until = self.clock.now() if heard.planned_s is None else heard.planned_s
            assert math.isclose(
                stats.waits.queue_s, until - request.received_s, rel_tol=1e-9, abs_tol=1e-6
            )
            assert min(stats.waits.place_s, stats.waits.load_s, stats.waits.kv_s) >= 0

    def expected(self, request: Request, choice: int) -> tuple[list[int], FinishReason, int]:
        """The choice's tokens, why it ends, and the stopping token or −1."""
        sampling, tokens = request.sampling, list(request.prompt_token_ids)
        pages = self.limits.num_pages - (self.adapter_pages if request.adapter else 0)
        room = min(self.limits.context_tokens, pages * self.limits.page_size + 1)
        output: list[int] = []
        while True:
            token = fake_next_token(request.flow.digest, sampling.seed, choice, tuple(tokens))
            tokens.append(token)
            output.append(token)
            stops = token in sampling.eos_token_ids + sampling.stop_token_ids
            if stops and len(output) > sampling.min_tokens:
                return output, FinishReason.STOP, token
            if len(output) == sampling.max_tokens or len(tokens) >= room:
                return output, FinishReason.LENGTH, -1

    def _check_idle(self, report: StepReport) -> None:
        """Nothing launched and nothing in flight means that everybody's weights are on the way."""
        if report.idle:
            books = self.core._books
            for flow in self._flows():
                if flow.first() is None or not self._is_ready(flow.lane):
                    continue
                assert self.core.snapshot().loading_adapters
                assert self._is_short(flow) or books.scarce

    def _note_ended_turns(self) -> None:
        turns = self.core._books.turns
        end = turns.end

        def noted(turn: Turn) -> None:
            self._ended.add(turn.lane.digest)
            end(turn)

        turns.end = noted  # type: ignore[method-assign]

    def _flows(self) -> list[Flow]:
        return [flow for lane in self.core._books.lanes.values() for flow in lane.flows.values()]

    def _check_work_conserved(self, plan: StepPlan) -> None:
        """Who waits lacks a place, seats, pages or tokens, or somebody before it lacks them."""
        books = self.core._books
        if books.scarce:
            return
        waiting = [flow for flow in self._flows() if flow.num_deferred]
        open_turns = {turn.lane for turn in books.turns if turn.closing_since is None}
        full = plan.num_tokens == self.limits.max_num_batched_tokens
        ended = {digest for digest in self._ended if digest not in books.turns}
        num_free = books.turns.num_free_places - len(ended)
        asked = [f for f in waiting if f.lane in open_turns or f.lane.digest in ended]
        excused = full or any(self._is_short(flow) for flow in asked)
        # the ring's first yields its seats to turns that have none, and to who is behind it; nobody
        # overtakes it
        seatless = any(not flow.lane.running for flow in asked)
        behind = any(self._was_behind(b, flow) for b in asked for flow in books.ring)
        yields = excused and (seatless or behind)
        for flow in waiting:
            first = flow.first()
            assert first is not None
            if books.in_flight(first) or self._is_short(flow):
                continue
            if flow.lane in open_turns:
                assert excused
            elif flow.lane.digest not in books.turns and flow.lane.digest not in ended:
                has_place = flow.lane.is_base or num_free > 0
                assert yields or not has_place or not self._is_ready(flow.lane)

    def _was_behind(self, flow: Flow, other: Flow) -> bool:
        """When the step was planned, it had had less service."""
        mine, theirs = self._levels[flow], self._levels[other]
        same_class = flow.key.service_class is other.key.service_class
        return same_class and (
            mine < theirs if flow.account is other.account else mine[1] < theirs[1]
        )

    def _is_ready(self, lane: Lane) -> bool:
        return lane.is_base or self.core._books.memory.slots.ready(lane.digest) is not None

    def _is_short(self, flow: Flow) -> bool:
        first, books = flow.first(), self.core._books
        assert first is not None
        pages = -(-(first.num_left + first.num_planned) // self.limits.page_size) + 1
        return len(books.free_seats) < first.num_seats_needed or books.memory.num_room < pages

    def check_at_rest(self) -> None:
        """Every page is free, cached or an idle adapter's; nobody holds anything."""
        snapshot = self.core.snapshot()
        assert snapshot.kv_pages == 0
        assert snapshot.running_sequences == snapshot.waiting_sequences == 0
        assert not snapshot.flows
        assert not self.core._books.lanes
        assert not self.weights.held
        assert all(heard.ended is not None for heard in self.heard.values())
