"""Executes step plans: forward (the trunk), sample (head and sampler), collect (the tokens)."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from engine_svc.model.arena import Arena
from engine_svc.model.forward_plan import ForwardPlanner, sampled_segments
from engine_svc.model.llama import Llama
from engine_svc.model.logprobs import RankedTokens, rank_tokens
from engine_svc.model.lora import StepLora
from engine_svc.model.sampler import Sampler
from engine_svc.model.seats import SeatState
from engine_svc.model.site_table import SiteTableRows
from engine_svc.model.slot_writer import ArenaSlotWriter
from engine_svc.model.vocabulary import AdapterVocabulary
from engine_svc.types import (
    BASE_DIGEST,
    NO_SLOT,
    Chunk,
    LateInputs,
    PromptLogprobs,
    Sample,
    SlotBinding,
    StepPlan,
    StepResult,
    TokenLogprobs,
)

#: Prompt positions whose logits exist at one time.
_PROMPT_BLOCK = 32


@dataclass(slots=True)
class _Running:
    """One step between forward and collect. Tensors may still be in flight on a GPU."""

    seats: list[int]
    tops: list[int | None]
    hidden: torch.Tensor
    prompts: list[tuple[int, int, int, list[int], RankedTokens]]
    compute_s: float
    tokens: torch.Tensor | None = None
    ranked: RankedTokens | None = None
    ranked_rows: list[int] = field(default_factory=list)


class ModelRunner:
    """engine_svc.core.ports.Runner over one model and arena.

    A CPU runs inside the calls; a GPU is waited for in collect only. Either way the input of a
    decode is the seat's last sampled token on the device, so a step may be planned while the one
    before it runs.
    """

    def __init__(
        self,
        model: Llama,
        arena: Arena,
        planner: ForwardPlanner,
        site_table: SiteTableRows,
        lora: StepLora,
        vocabulary: AdapterVocabulary,
        slot_writer: ArenaSlotWriter,
        seats: SeatState,
    ) -> None:
        self._model, self._arena, self._planner = model, arena, planner
        self._site_table, self._lora, self._slot_writer = site_table, lora, slot_writer
        self._vocabulary, self._seats = vocabulary, seats
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
            self._bind(binding)
        for copy in plan.page_copies:
            self._arena.copy(copy.source, copy.target)
        for opening in plan.seat_openings:
            self._seats.open(opening)
        running = _Running([], [], self._seats.last_token[:0], [], 0.0)
        if plan.chunks:
            running.hidden, running.prompts = self._trunk(plan)
        for chunk in plan.chunks:
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
            logits = self._model.logits(running.hidden, sampled_segments(plan.chunks))
            positions = [
                chunk.start + chunk.num_tokens for chunk in plan.chunks for _ in chunk.sample_seats
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
        prompts = tuple(
            PromptLogprobs(seat, first, tuple(ranked.rows(targets, [top] * len(targets))))
            for seat, first, top, targets, ranked in running.prompts
        )
        compute_s = running.compute_s + time.perf_counter() - begun
        return StepResult(step, samples, prompts, compute_s)

    @torch.inference_mode()
    def all_logits(self, plan: StepPlan) -> torch.Tensor:
        """[T, V] fp32 of every position of a plan without seats: for tools, nothing is sampled."""
        for binding in plan.slot_bindings:
            self._bind(binding)
        step = self._planner.plan(plan)
        self._arena.clear(step.fresh_pages)
        hidden = self._model.forward(step, step.token_ids)
        return self._model.logits(hidden, step.segments)

    def _bind(self, binding: SlotBinding) -> None:
        if binding.digest == BASE_DIGEST:
            self._site_table.clear(binding.slot)
            self._lora.bind(binding.slot, None)
            self._vocabulary.bind(binding.slot, None)
            return
        row = self._slot_writer.take_row(binding.slot, binding.digest)
        self._site_table.write(binding.slot, row)
        self._lora.bind(binding.slot, row)
        self._vocabulary.bind(binding.slot, row)

    def _trunk(
        self, plan: StepPlan
    ) -> tuple[torch.Tensor, list[tuple[int, int, int, list[int], RankedTokens]]]:
        """Hidden states of the rows that sample [n, C], and what prompt_logprobs asked for."""
        for chunk in plan.chunks:
            bound = chunk.slot == NO_SLOT or self._site_table.digest(chunk.slot)
            assert bound, f"slot {chunk.slot} holds no adapter: the base must not answer for it"
        step = self._planner.plan(plan)
        self._arena.clear(step.fresh_pages)
        token_ids = step.token_ids
        if step.late_rows.numel():
            last = self._seats.last_token.index_select(0, step.late_seats)
            token_ids = token_ids.index_copy(0, step.late_rows, last)
        hidden = self._model.forward(step, token_ids)
        rows = [
            first + chunk.num_tokens - 1
            for chunk, first in zip(plan.chunks, step.first_rows, strict=True)
            for _ in chunk.sample_seats
        ]
        prompts = []
        for chunk, first in zip(plan.chunks, step.first_rows, strict=True):
            if chunk.prompt_logprobs is not None:
                prompts.extend(self._prompt_logprobs(chunk, hidden[first:], chunk.prompt_logprobs))
        return hidden[torch.tensor(rows, dtype=torch.int64, device=hidden.device)], prompts

    def _prompt_logprobs(
        self, chunk: Chunk, hidden: torch.Tensor, top: int
    ) -> list[tuple[int, int, int, list[int], RankedTokens]]:
        """(seat, first position, top, tokens, ranked), in blocks that bound the logits' memory."""
        following = [*chunk.token_ids[1:], chunk.next_prompt_token]
        targets = following if chunk.next_prompt_token >= 0 else following[:-1]
        blocks = []
        for start in range(0, len(targets), _PROMPT_BLOCK):
            block = targets[start : start + _PROMPT_BLOCK]
            rows = hidden[start : start + len(block)]
            logits = self._model.logits(rows, ((0, len(block), chunk.slot),))
            ids = torch.tensor(block, device=hidden.device)
            ranked = rank_tokens(logits, ids, top)
            blocks.append((chunk.seat, chunk.start + start + 1, top, block, ranked))
        return blocks

    def _rank(self, running: _Running, logits: torch.Tensor) -> None:
        rows = [row for row, top in enumerate(running.tops) if top is not None]
        if rows and running.tokens is not None:
            at = torch.tensor(rows, device=logits.device)
            chosen = running.tokens.index_select(0, at).clamp(min=0)
            most = max(running.tops[row] or 0 for row in rows)
            running.ranked = rank_tokens(logits.index_select(0, at), chosen, most)
            running.ranked_rows = rows
