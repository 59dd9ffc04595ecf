"""The real EngineCore as a policy of the simulator: everything around it is simulated, it is not.

The weights lie on the host; a copy into a slot takes COPY_S beside the steps. The core's time is
not part of the simulated time: the benchmark measures it apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.fairness.policy import (
    COPY_S,
    COPY_SLOWDOWN,
    Job,
    Shape,
    StepFacts,
    step_s,
)
from engine_svc.core.engine import EngineCore
from engine_svc.core.limits import adapters_ahead
from engine_svc.types import (
    NO_SLOT,
    AdapterRef,
    EngineLimits,
    Failure,
    FlowKey,
    HostSpan,
    LateInputs,
    Request,
    RequestEnded,
    Sample,
    SamplingParams,
    ServiceClass,
    SlotLoad,
    StepPlan,
    StepResult,
    WeightsReady,
)

Cost = Callable[[int, int, int], float]
TENANT = "default"
#: an H200's 139 GiB less 15 of weights and a tenth for the rest, in pages of 16 positions
ARENA_PAGES = 57_000
PAGE_SIZE, PAGE_BYTES = 16, 2 << 20
#: 83.9 MB
ADAPTER_PAGES = 40
#: as engine_svc/compose.py has it; with 300 adapters a place none is there still when its next turn
#: comes, so slots only hold what is copied in for the turns that come
SLOTS_A_PLACE = 4
#: a core that has nothing to run looks again after so long
IDLE_S = 0.0005


class SimClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s


@dataclass(slots=True, eq=False)
class _Run:
    """A job as the runner knows it."""

    job: Job
    opened: bool = False
    #: positions that have been computed; after a preemption they are computed again
    furthest: int = 0


class SimRunner:
    """Answers every plan at once with token 1; knows from the seats which job a chunk is of.
    `cost`: seconds of a step of so many sequences, adapters and prompt tokens."""

    def __init__(self, clock: SimClock, cost: Cost = step_s) -> None:
        self._clock, self._cost = clock, cost
        self._runs: dict[int, _Run] = {}
        self._by_seat: dict[int, _Run] = {}
        self._results: deque[StepResult] = deque()
        self.facts = StepFacts({}, 0, 0, 0, (), 0.0)
        #: positions that were computed once more, since their pages had been given up
        self.num_again = 0

    def know(self, job: Job) -> None:
        self._runs[job.number] = _Run(job)

    def forget(self, number: int) -> Job:
        return self._runs.pop(number).job

    def forward(self, plan: StepPlan) -> None:
        pauses = 0
        for opening in plan.seat_openings:
            run = self._by_seat[opening.seat] = self._runs[opening.sampling.seed]
            pauses += run.opened
            run.opened = True
        served: dict[int, int] = {}
        prompt_tokens, slots = 0, set()
        for chunk in plan.chunks:
            run = self._by_seat[chunk.seat]
            end = chunk.start + chunk.num_tokens
            if chunk.num_tokens == 1 and chunk.start >= run.job.prompt:
                service = 2 * (end > run.furthest)
            else:
                service = _service(run, chunk.start, end)
                prompt_tokens += chunk.num_tokens
            if chunk.start < run.furthest:
                self.num_again += min(end, run.furthest) - chunk.start
            if end > run.furthest:
                run.furthest = end
            served[run.job.flow] = served.get(run.job.flow, 0) + service
            slots.add(chunk.slot)
        samples = tuple(Sample(seat, 1) for chunk in plan.chunks for seat in chunk.sample_seats)
        seconds = self._cost(len(plan.chunks), len(slots - {NO_SLOT}), prompt_tokens)
        self._results.append(StepResult(plan.step, samples, compute_s=seconds))
        swaps = len(plan.slot_bindings)
        self.facts = StepFacts(served, len(plan.chunks), swaps, pauses, (), 0.0)

    def sample(self, plan: StepPlan, late: LateInputs) -> None:
        pass

    def collect(self, step: int) -> StepResult:
        result = self._results.popleft()
        slowed = self.facts.swaps * COPY_S * COPY_SLOWDOWN
        self._clock.now_s += result.compute_s + slowed
        return result


def _service(run: _Run, start: int, end: int) -> int:
    """What positions that were never computed before are worth."""
    start, prompt = max(start, run.furthest), run.job.prompt
    return max(0, end - start) + max(0, end - max(start, prompt))


class SimWriter:
    """Copies end COPY_S after they began, one after the other."""

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self._loads: deque[tuple[float, SlotLoad]] = deque()
        self._free_s = 0.0

    def start(self, load: SlotLoad) -> None:
        self._free_s = max(self._free_s, self._clock.now()) + COPY_S
        self._loads.append((self._free_s, load))

    def poll(self) -> tuple[tuple[SlotLoad, Failure | None], ...]:
        done: list[tuple[SlotLoad, Failure | None]] = []
        while self._loads and self._loads[0][0] <= self._clock.now():
            done.append((self._loads.popleft()[1], None))
        return tuple(done)


class SimWeights:
    """All weights are on the host: each want is answered at the next poll."""

    def __init__(self) -> None:
        self._asked: dict[str, None] = {}

    def want(self, ref: AdapterRef, rank: int) -> None:
        self._asked[ref.digest] = None

    def drop(self, digest: str) -> None:
        pass

    def poll(self) -> tuple[WeightsReady, ...]:
        answers = tuple(
            WeightsReady(digest, HostSpan(0, 1), ADAPTER_PAGES, 1, "host", 0.0)
            for digest in self._asked
        )
        self._asked.clear()
        return answers


def limits_of(shape: Shape, quantum: int, turn_max_steps: int) -> EngineLimits:
    """The queue has room for all; the arena is an H200's, so what is paused takes KV from it."""
    slots = SLOTS_A_PLACE * shape.max_loras
    prefetched, wanted = adapters_ahead(shape.max_loras)
    return EngineLimits(
        max_loras=shape.max_loras,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        num_pages=ARENA_PAGES,
        page_size=PAGE_SIZE,
        page_bytes=PAGE_BYTES,
        num_slots=slots,
        context_tokens=1024,
        max_queued_requests=1 << 20,
        max_queued_tokens=1 << 30,
        max_queue_wait_s=1e9,
        quantum=quantum,
        turn_max_steps=turn_max_steps,
        closing_steps=2,
        prefix_cache=False,
        prefetch_adapters=prefetched,
        max_wanted=wanted,
    )


class Turns:
    """loraplex's own scheduler."""

    def __init__(
        self, limits: EngineLimits, clock: SimClock | None = None, cost: Cost = step_s
    ) -> None:
        self.clock = clock or SimClock()
        self.runner = SimRunner(self.clock, cost)
        writer = SimWriter(self.clock)
        self.core = EngineCore(limits, self.runner, writer, SimWeights(), self.clock)
        self._refs: dict[int, AdapterRef] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}

    def submit(self, job: Job) -> None:
        ref = self._refs.get(job.flow)
        if ref is None:
            ref = self._refs[job.flow] = AdapterRef(f"a{job.flow}", 1, f"sha256:{job.flow}")
        prompt = self._prompts.setdefault(job.prompt, (1,) * job.prompt)
        self.runner.know(job)
        self.core.submit(
            Request(
                str(job.number),
                FlowKey(ServiceClass.INTERACTIVE, TENANT, ref.digest),
                prompt,
                SamplingParams(job.output, seed=job.number),
                self.clock.now(),
                ref,
            )
        )

    def step(self) -> StepFacts:
        report = self.core.step()
        facts = self.runner.facts
        if report.step < 0:
            self.clock.now_s += IDLE_S
            facts = StepFacts({}, 0, 0, 0, (), 0.0)
        facts.finished = self.finished()
        facts.now_s = self.clock.now_s
        return facts

    def finished(self) -> list[Job]:
        """Jobs that were answered since the last call. Raises: RuntimeError: one failed."""
        jobs = []
        for item in self.core.take_outputs():
            if isinstance(item, RequestEnded):
                if item.failure is not None:
                    raise RuntimeError(f"request {item.request_id} failed: {item.failure.message}")
                jobs.append(self.runner.forget(int(item.request_id)))
        return jobs
