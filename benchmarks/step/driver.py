"""Whole steps through a model's Runner, from hand-made plans: no scheduler, no requests.

Every sequence keeps its seat and its pages. Prompts are equal, so one is computed and its pages are
copied to the others; what a step costs does not depend on what the pages hold.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.shared.packed_adapters import PackedAdapter
from engine_svc.model.build import LoadedModel
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
    LateInputs,
    PageCopy,
    SamplingParams,
    SeatOpening,
    SlotBinding,
    SlotLoad,
    StepPlan,
    StepResult,
)

NOTHING_LATE = LateInputs()
COPY_TIMEOUT_S = 120.0
#: the token that stands for what a prefill would have sampled
FIRST_TOKEN = 7


@dataclass(frozen=True, slots=True)
class Decoded:
    """One run of decode steps. `ended_s`: when each step's tokens were on the host;
    `compute_s`: how long each ran on the device."""

    ended_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    #: [sequence][token], in the order of seats
    tokens: tuple[tuple[int, ...], ...]

    @property
    def tpot_s(self) -> float:
        return (self.ended_s[-1] - self.ended_s[0]) / (len(self.ended_s) - 1)


class StepDriver:
    """Seats 0 … num_seqs − 1 of one loaded model, `prompt` + `output` positions each."""

    def __init__(self, model: LoadedModel, num_seqs: int, prompt: int, output: int) -> None:
        """Raises: ValueError when the arena has too few pages."""
        self._model, self._runner = model, model.runner
        self._prompt, self._output = prompt, output
        self._free = list(range(model.num_pages - 1, -1, -1))
        self._step = 0
        needed = -(-(prompt + output) // model.page_size)
        if num_seqs * needed > len(self._free):
            raise ValueError(f"{num_seqs} sequences take {needed} pages each: arena too small")
        self._pages = [tuple(self._take(needed)) for _ in range(num_seqs)]
        tokens = model.base.vocab_size - 1
        self._token_ids = tuple(1 + 31 * position % tokens for position in range(prompt))
        self._sampling = SamplingParams(output, seed=0, temperature=0.0)
        self._bindings: list[SlotBinding] = []
        self._slots = 0

    def load(self, adapters: Sequence[PackedAdapter]) -> tuple[int, ...]:
        """Copy adapters into the next slots through the slot writer; bound by the next plan."""
        writer, loads = self._model.slot_writer, []
        for adapter in adapters:
            pages = tuple(self._take(adapter.num_pages))
            loads.append(SlotLoad(self._slots, adapter.ref.digest, adapter.span, pages))
            self._slots += 1
            writer.start(loads[-1])
        left, deadline = len(loads), time.monotonic() + COPY_TIMEOUT_S
        while left:
            for load, failure in writer.poll():
                if failure is not None:
                    raise RuntimeError(f"slot {load.slot} was not filled: {failure.message}")
                self._bindings.append(SlotBinding(load.slot, load.digest, load.page_ids))
                left -= 1
            if time.monotonic() > deadline:
                raise RuntimeError(f"{left} adapters were not copied in {COPY_TIMEOUT_S:g} s")
            time.sleep(0.001)
        return tuple(load.slot for load in loads)

    def fill_prompts(self) -> None:
        """Compute the first sequence's prompt with the base model, copy it to all others."""
        self.prefill([NO_SLOT])
        whole = -(-self._prompt // self._model.page_size)
        copies = [
            PageCopy(source, target)
            for pages in self._pages[1:]
            for source, target in zip(self._pages[0][:whole], pages, strict=False)
        ]
        for start in range(0, len(copies), 1024):
            self._launch(self._plan((), copies=tuple(copies[start : start + 1024])))
            self._runner.collect(self._step)

    def prefill(self, slots: Sequence[int], budget: int = 0) -> float:
        """Seconds to compute the prompts of seats 0 … len(slots) − 1, each with its slot.

        Args: budget, tokens a step, whole prompts only; 0: all at once.
        """
        a_step = max(1, budget // self._prompt) if budget else len(slots)
        plans = []
        for first in range(0, len(slots), a_step):
            seats = range(first, min(first + a_step, len(slots)))
            chunks = [
                Chunk(seat, slots[seat], 0, self._prompt, self._token_ids,
                      self._pages[seat][: -(-self._prompt // self._model.page_size)], (seat,))
                for seat in seats
            ]  # fmt: skip
            openings = [SeatOpening(seat, self._sampling, 0, self._token_ids) for seat in seats]
            plans.append(self._plan(chunks, tuple(openings)))
        began = time.perf_counter()
        ended, _ = self._run(plans)
        return ended[-1] - began

    def decode(self, slots: Sequence[int], num_steps: int = 0) -> Decoded:
        """One token a step for seats 0 … len(slots) − 1 behind their prompts; run-ahead 1."""
        steps = num_steps or self._output
        openings = tuple(
            SeatOpening(seat, self._sampling, 0, self._token_ids, (FIRST_TOKEN,))
            for seat in range(len(slots))
        )
        plans, pages = [], self._pages
        for number in range(steps):
            position = self._prompt + number
            if position % self._model.page_size == 0 or not number:
                # the same tuples until a page is full, as the core's plans have them
                used = position // self._model.page_size + 1
                pages = [pages[:used] for pages in self._pages[: len(slots)]]
            chunks = [
                Chunk(seat, slot, position, 1, (), pages[seat], (seat,))
                for seat, slot in enumerate(slots)
            ]
            plans.append(self._plan(chunks, openings if number == 0 else ()))
        ended, results = self._run(plans)
        by_seat = [[0] * steps for _ in slots]
        for number, result in enumerate(results):
            for sample in result.samples:
                by_seat[sample.seat][number] = sample.token_id
        compute_s = tuple(result.compute_s for result in results)
        return Decoded(tuple(ended), compute_s, tuple(map(tuple, by_seat)))

    def mixed(self, slots: Sequence[int], num_prompts: int, num_steps: int) -> tuple[float, ...]:
        """Seconds on the device of a step again and again: whole prompts of the last `num_prompts`
        seats beside one token of each seat before them."""
        seats = range(len(slots))
        first = len(slots) - num_prompts
        chunks = []
        for seat in seats:
            ids = self._token_ids if seat >= first else ()
            start, count = (0, self._prompt) if ids else (self._prompt, 1)
            pages = self._pages[seat][: -(-(start + count) // self._model.page_size)]
            chunks.append(Chunk(seat, slots[seat], start, count, ids, pages, (seat,)))
        openings = tuple(
            SeatOpening(seat, self._sampling, 0, self._token_ids, (FIRST_TOKEN,)) for seat in seats
        )
        plans = [
            self._plan(chunks, openings if number == 0 else ()) for number in range(num_steps + 1)
        ]
        _, results = self._run(plans)
        return tuple(result.compute_s for result in results[1:])

    def _run(self, plans: Sequence[StepPlan]) -> tuple[list[float], list[StepResult]]:
        """Each plan is launched before the one before it is collected.

        Without the garbage collector, as timeit has it: a walk over what a start left took 0.1 s of
        128 steps, and the engine's core freezes that.
        """
        ended: list[float] = []
        results: list[StepResult] = []

        def collect(plan: StepPlan) -> None:
            results.append(self._runner.collect(plan.step))
            ended.append(time.perf_counter())

        before: StepPlan | None = None
        gc.disable()
        try:
            for plan in plans:
                self._launch(plan)
                if before is not None:
                    collect(before)
                before = plan
            if before is not None:
                collect(before)
        finally:
            gc.enable()
        return ended, results

    def _launch(self, plan: StepPlan) -> None:
        self._runner.forward(plan)
        self._runner.sample(plan, NOTHING_LATE)

    def _plan(
        self,
        chunks: Sequence[Chunk],
        openings: tuple[SeatOpening, ...] = (),
        copies: tuple[PageCopy, ...] = (),
    ) -> StepPlan:
        self._step += 1
        bindings, self._bindings = tuple(self._bindings), []
        ordered = sorted(chunks, key=lambda chunk: (chunk.slot == NO_SLOT, chunk.slot))
        return StepPlan(self._step, Chunks.of(ordered), openings, bindings, copies, run_ahead=1)

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} left: arena too small")
        return [self._free.pop() for _ in range(count)]
