"""Executes step plans on a GPU: nothing waits for the device but `collect`.

    forward   bindings, page copies, openings; inputs staged; a graph replayed, or launches
    sample    head and sampler; tokens stay on the device, a copy goes to the host
    collect   waits for that copy

Everything is ordered on one stream in the order of the plans, so step n + 1 is enqueued while step
n runs, and its decodes read their tokens on the device. On CPU tensors the same code runs without
streams and graphs: tests hold it against model/runner.py.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from engine_svc.model.arena import Arena
from engine_svc.model.gpu.allocation_guard import AllocationGuard
from engine_svc.model.gpu.output_head import OutputHead
from engine_svc.model.gpu.sampler import GpuSampler, PendingSample
from engine_svc.model.gpu.step_rows import StepRows
from engine_svc.model.gpu.stepper import StagedStep, Stepper
from engine_svc.model.gpu.timeline import Timeline, Timing
from engine_svc.model.gpu.trunk import TrunkStep
from engine_svc.model.prompt_logits import PromptBlock, prompt_blocks
from engine_svc.model.site_table import SlotRow
from engine_svc.model.slot_bindings import SlotBindings
from engine_svc.model.vocabulary import AdapterVocabulary
from engine_svc.types import LateInputs, Sample, StepPlan, StepResult
from kernels.embed_rows import resolved_ids


@dataclass(slots=True)
class _Running:
    """One step between forward and collect."""

    timing: Timing
    staged: StagedStep | None = None
    hidden: torch.Tensor | None = None
    has_own_vocabulary: bool = False
    prompts: list[PromptBlock] = field(default_factory=list)
    pending: PendingSample | None = None


class GpuRunner:
    """engine_svc.core.ports.Runner over static buffers."""

    def __init__(
        self,
        stepper: Stepper,
        head: OutputHead,
        sampler: GpuSampler,
        vocabulary: AdapterVocabulary,
        bindings: SlotBindings,
        arena: Arena,
        timeline: Timeline,
        guard: AllocationGuard,
        num_bytes: int,
    ) -> None:
        """Args: num_bytes, of the static buffers."""
        self._stepper, self._head, self._sampler = stepper, head, sampler
        self._vocabulary, self._bindings, self._arena = vocabulary, bindings, arena
        self._timeline, self._guard = timeline, guard
        self.num_bytes = num_bytes
        self._running: OrderedDict[int, _Running] = OrderedDict()

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        assert len(self._running) <= plan.run_ahead, "more steps in flight than the plan allows"
        with self._timeline.stream():
            running = _Running(self._timeline.begin())
            self._prepare(plan)
            self._sampler.open(plan.seat_openings)
            if plan.chunks:
                self._trunk(plan, running)
        self._running[plan.step] = running

    @torch.inference_mode()
    def sample(self, plan: StepPlan, late: LateInputs) -> None:
        running = self._running[plan.step]
        with self._timeline.stream():
            staged, hidden = running.staged, running.hidden
            if staged is not None and hidden is not None and staged.rows.sample_seats:
                rows = staged.rows
                if running.has_own_vocabulary:
                    logits = self._head.adapted_logits(rows, hidden)
                else:
                    logits = self._head.logits(staged, hidden)
                running.pending = self._sampler.launch(
                    logits, rows.sample_seats, rows.sample_positions, dict(late.token_masks)
                )
            running.hidden = None
            self._timeline.end(running.timing)

    @torch.inference_mode()
    def collect(self, step: int) -> StepResult:
        assert next(iter(self._running), None) == step, "steps are collected in order, each once"
        running = self._running.pop(step)
        samples: tuple[Sample, ...] = ()
        if running.pending is not None and running.staged is not None:
            taken = self._sampler.take(running.pending)
            seats = running.staged.rows.sample_seats
            samples = tuple(
                [
                    Sample(seat, token, taken.logprobs.get(row) if token >= 0 else None)
                    for row, (seat, token) in enumerate(zip(seats, taken.tokens, strict=True))
                ]
            )
        with self._timeline.stream():
            prompts = tuple(block.collect() for block in running.prompts)
        self._guard.stepped()
        return StepResult(step, samples, prompts, self._timeline.seconds(running.timing))

    @property
    def num_serving_allocations(self) -> int:
        """Device allocations since serving began."""
        return self._guard.num_allocations

    @torch.inference_mode()
    def all_logits(self, plan: StepPlan) -> torch.Tensor:
        """[T, V] fp32 of every position of a plan without seats: for tools, nothing is sampled."""
        running = _Running(self._timeline.begin())
        with self._timeline.stream():
            self._prepare(plan)
            hidden, rows = self._trunk(plan, running)
            logits = self._head.of_segments(hidden[: rows.num_rows], rows.segments).float()
            self._timeline.wait()
        return logits

    def wait(self) -> None:
        """Until the device has done everything: before the first step, and in tests."""
        self._timeline.wait()

    @torch.inference_mode()
    def capture(self, plan: StepPlan) -> None:
        """Make a graph of the trunk of steps like this one, which has run before."""
        with self._timeline.stream():
            self._stepper.capture(plan.chunks)
            self._timeline.wait()

    @torch.inference_mode()
    def apply(self, slot: int, row: SlotRow | None) -> None:
        """The slot holds what this row says, or nothing, for the steps from here on."""
        with self._timeline.stream():
            self._bindings.apply(slot, row)

    def _prepare(self, plan: StepPlan) -> None:
        for binding in plan.slot_bindings:
            self._bindings.bind(binding)
        for copy in plan.page_copies:
            self._arena.copy(copy.source, copy.target)

    def _trunk(self, plan: StepPlan, running: _Running) -> tuple[torch.Tensor, StepRows]:
        staged = running.staged = self._stepper.stage(plan.chunks)
        slots = [slot for _, _, slot in staged.rows.segments if slot >= 0]
        self._bindings.check_bound(slots)
        running.has_own_vocabulary = any(self._vocabulary.brings(slot) for slot in slots)
        amend = self._amend if running.has_own_vocabulary else None
        hidden = running.hidden = self._stepper.run(staged, amend)
        running.prompts = prompt_blocks(
            plan.chunks, staged.rows.first_rows, hidden, self._head.of_segments
        )
        return hidden, staged.rows

    def _amend(self, step: TrunkStep, rows: StepRows, embedded: torch.Tensor) -> None:
        ids = resolved_ids(step.token_ids, step.row_seat, self._sampler.last_token)
        self._vocabulary.embed(rows.segments, ids[: rows.num_rows], embedded[: rows.num_rows])
