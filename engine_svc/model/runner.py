"""Executes step plans: forward (the trunk), sample (head and sampler), collect (the tokens)."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine_svc.model.arena import Arena
from engine_svc.model.forward_plan import ForwardPlanner, sampled_segments
from engine_svc.model.llama import Llama
from engine_svc.model.logprobs import RankedTokens, rank_tokens
from engine_svc.model.prompt_logits import PromptBlock, prompt_blocks
from engine_svc.model.sampler import Sampler
from engine_svc.model.seats import SeatState
from engine_svc.model.slot_bindings import SlotBindings
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    LateInputs,
    Sample,
    StepPlan,
    StepResult,
    TokenLogprobs,
)


@dataclass(slots=True)
class _Running:
    """One step between forward and collect."""

    chunks: Sequence[Chunk]
    seats: list[int]
    tops: list[int | None]
    hidden: torch.Tensor
    prompts: list[PromptBlock]
    compute_s: float
    tokens: torch.Tensor | None = None
    ranked: RankedTokens | None = None
    ranked_rows: list[int] = field(default_factory=list)


class ModelRunner:
    """engine_svc.core.ports.Runner over one model and arena.

    Everything runs inside the calls. The input of a decode is the seat's last sampled token, so a
    step may be planned before the tokens of the one before it are collected.
    """

    def __init__(
        self,
        model: Llama,
        arena: Arena,
        planner: ForwardPlanner,
        bindings: SlotBindings,
        seats: SeatState,
    ) -> None:
        self._model, self._arena, self._planner = model, arena, planner
        self._bindings, self._seats = bindings, seats
        self._sampler = Sampler(seats)
        self._running: OrderedDict[int, _Running] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Bytes of the seats' state."""
        return self._seats.num_bytes

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        begun = time.perf_counter()
        assert len(self._running) <= plan.run_ahead, "more steps in flight than the plan allows"
        for binding in plan.slot_bindings:
            self._bindings.bind(binding)
        for copy in plan.page_copies:
            self._arena.copy(copy.source, copy.target)
        for opening in plan.seat_openings:
            self._seats.open(opening)
        running = _Running(tuple(plan.chunks), [], [], self._seats.last_token[:0], [], 0.0)
        if running.chunks:
            running.hidden, running.prompts = self._trunk(plan.chunks, running.chunks)
        for chunk in running.chunks:
            for seat in chunk.sample_seats:
                running.seats.append(seat)
                running.tops.append(self._seats.params(seat).sampling.logprobs)
        running.compute_s = time.perf_counter() - begun
        self._running[plan.step] = running

    @torch.inference_mode()
    def sample(self, plan: StepPlan, late: LateInputs) -> None:
        begun = time.perf_counter()
        running = self._running[plan.step]
        if running.seats:
            logits = self._model.logits(running.hidden, sampled_segments(running.chunks))
            positions = [
                chunk.start + chunk.num_tokens
                for chunk in running.chunks
                for _ in chunk.sample_seats
            ]
            masks = dict(late.token_masks)
            running.tokens = self._sampler.sample(logits, running.seats, positions, masks)
            self._rank(running, logits)
        running.compute_s += time.perf_counter() - begun

    @torch.inference_mode()
    def collect(self, step: int) -> StepResult:
        begun = time.perf_counter()
        assert next(iter(self._running), None) == step, "steps are collected in order, each once"
        running = self._running.pop(step)
        tokens = [] if running.tokens is None else running.tokens.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        if running.ranked is not None:
            rows = running.ranked_rows
            counts = [running.tops[row] or 0 for row in rows]
            ranked = running.ranked.rows([tokens[row] for row in rows], counts)
            logprobs = dict(zip(rows, ranked, strict=True))
        samples = tuple(
            Sample(seat, token, logprobs.get(row) if token >= 0 else None)
            for row, (seat, token) in enumerate(zip(running.seats, tokens, strict=True))
        )
        prompts = tuple(block.collect() for block in running.prompts)
        compute_s = running.compute_s + time.perf_counter() - begun
        return StepResult(step, samples, prompts, compute_s)

    @torch.inference_mode()
    def all_logits(self, plan: StepPlan) -> torch.Tensor:
        """[T, V] fp32 of every position of a plan without seats: for tools, nothing is sampled."""
        for binding in plan.slot_bindings:
            self._bindings.bind(binding)
        step = self._planner.plan(tuple(plan.chunks))
        self._arena.clear(step.fresh_pages)
        hidden = self._model.forward(step, step.token_ids)
        return self._model.logits(hidden, step.segments)

    def _trunk(
        self, columns: Chunks, chunks: Sequence[Chunk]
    ) -> tuple[torch.Tensor, list[PromptBlock]]:
        """Hidden states of the rows that sample [n, C], and what prompt_logprobs asked for."""
        self._bindings.check_bound(columns.slots)
        step = self._planner.plan(chunks)
        self._arena.clear(step.fresh_pages)
        token_ids = step.token_ids
        if step.late_rows.numel():
            last = self._seats.last_token.index_select(0, step.late_seats)
            token_ids = token_ids.index_copy(0, step.late_rows, last)
        hidden = self._model.forward(step, token_ids)
        rows = [
            first + chunk.num_tokens - 1
            for chunk, first in zip(chunks, step.first_rows, strict=True)
            for _ in chunk.sample_seats
        ]
        prompts = prompt_blocks(columns, step.first_rows, hidden, self._model.logits)
        return hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)], prompts

    def _rank(self, running: _Running, logits: torch.Tensor) -> None:
        rows = [row for row, top in enumerate(running.tops) if top is not None]
        if rows and running.tokens is not None:
            at = torch.tensor(rows, device=logits.device)
            chosen = running.tokens.index_select(0, at).clamp(min=0)
            most = max(running.tops[row] or 0 for row in rows)
            running.ranked = rank_tokens(logits.index_select(0, at), chosen, most)
            running.ranked_rows = rows
