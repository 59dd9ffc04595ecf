"""Before serving: run and capture every kind of step, so that nothing is compiled, loaded or
allocated later."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import torch

from engine_svc.layout import AdapterLayout
from engine_svc.model.gpu.buckets import padded_rows
from engine_svc.model.gpu.runner import GpuRunner
from engine_svc.model.gpu.stepper import Stepper
from engine_svc.model.gpu.synthetic_adapter import Outer, synthetic_row
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
    LateInputs,
    SamplingParams,
    SeatOpening,
    StepPlan,
)
from kernels.rank_tokens import MAX_TOP

log = logging.getLogger(__name__)

_SLOT = 0
_NOTHING_LATE = LateInputs()
#: everything that a sampler may be asked for, in one seat or another; _CUT: the one of which tokens
#: are drawn among a few
_SAMPLING = (
    SamplingParams(max_tokens=1, seed=0, temperature=0.0),
    SamplingParams(max_tokens=1, seed=0, top_p=0.9, top_k=20, min_p=0.01, logprobs=2),
    SamplingParams(
        max_tokens=1, seed=0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
        min_tokens=1, stop_token_ids=(0,), logit_bias=((0, 1.0),),
    ),
)  # fmt: skip
_CUT = 1


class WarmUp:
    """Steps over page 0 and a synthetic adapter in slot 0, through the runner's own verbs."""

    def __init__(
        self,
        runner: GpuRunner,
        stepper: Stepper,
        layout: AdapterLayout,
        *,
        page_size: int,
        longest: int,
        max_num_seqs: int,
        max_rows: int,
        vocab_size: int,
        rank_blocks: int,
    ) -> None:
        """Args: longest, positions of a sequence at most; rank_blocks, of an adapter at most."""
        self._runner, self._stepper = runner, stepper
        self._layout, self._page_size = layout, page_size
        self._longest = longest
        self._max_num_seqs, self._max_rows = max_num_seqs, max_rows
        self._step, self._vocab_size, self._rank_blocks = -1, vocab_size, rank_blocks

    @torch.inference_mode()
    def run(self, *, capture: bool) -> None:
        """Everything once; with `capture`, every bucket becomes a graph."""
        begun = time.perf_counter()
        self._runner.wait()
        self._runner.apply(_SLOT, synthetic_row(self._layout, Outer.NOTHING, 0))
        for chunks, is_bucket in self._steps():
            self._run(chunks, capture and is_bucket)
        self._run_rare()
        self._runner.apply(_SLOT, None)
        self._runner.wait()
        log.info(
            "model.warmed_up",
            extra={
                "seconds": round(time.perf_counter() - begun, 2),
                "graphs": self._stepper.num_graphs,
            },
        )

    def _run_rare(self) -> None:
        """What has no graph: prompts of a high rank, whose work items may be long; an adapter's own
        vocabulary or LoRA of the head, prompt_logprobs, grammar masks, a long sequence with
        penalties."""
        row = synthetic_row(self._layout, Outer.NOTHING, 0, self._rank_blocks)
        self._runner.apply(_SLOT, row)
        for rows in {*self._stepper.mixed_buckets[-1:], self._max_rows}:
            self._run(self._prompts(rows, _SLOT), False)
        decodes = [self._chunk(seat, _SLOT, 1, 1) for seat in range(self._max_num_seqs)]
        for outer in (Outer.VOCABULARY, Outer.HEAD):
            row = synthetic_row(self._layout, outer, self._vocab_size)
            self._runner.apply(_SLOT, row)
            self._run(self._prompts(self._max_rows, _SLOT), False)
            self._run(decodes, False)
        # fewer seats than wishes: each wish in turn
        for first_wish in range(max(1, len(_SAMPLING) + 1 - len(decodes))):
            self._run(decodes, False, context=self._longest, first_wish=first_wish)
        for slot in (_SLOT, NO_SLOT):
            count = min(self._longest, self._max_rows)
            prompt = self._chunk(0, slot, 0, count)._replace(prompt_logprobs=MAX_TOP)
            everything = bytes([255]) * -(-self._vocab_size // 8)
            self._run([prompt], False, LateInputs(((0, everything),)), first_wish=_CUT)

    def _steps(self) -> Iterator[tuple[list[Chunk], bool]]:
        """Largest first, so that memory is asked for once; whether a graph is made of it. The base
        alone before graphs with LoRA exist, which would be replayed for it."""
        stepper = self._stepper
        largest = max(stepper.mixed_buckets, default=0)
        eager = {padded_rows(self._max_rows >> shift, self._max_rows) for shift in range(8)}
        for slot in (NO_SLOT, _SLOT):
            for rows in sorted((n for n in eager if n > max(largest, 1)), reverse=True):
                yield self._prompts(rows, slot), False
            for rows in reversed(stepper.mixed_buckets):
                yield self._prompts(rows, slot), slot != NO_SLOT
            for rows in reversed(stepper.decode_buckets):
                yield [self._chunk(seat, slot, 1, 1) for seat in range(rows)], True

    def _prompts(self, rows: int, slot: int) -> list[Chunk]:
        """As few prompts as fit the context, and one decode where there is a seat for it."""
        chunks: list[Chunk] = []
        while rows > 0 and len(chunks) < self._max_num_seqs:
            count = min(rows, self._longest)
            if count == rows and count > 2 and len(chunks) + 1 < self._max_num_seqs:
                count -= 1
            chunks.append(self._chunk(len(chunks), slot, 0, count))
            rows -= count
        return chunks

    def _chunk(self, seat: int, slot: int, start: int, count: int) -> Chunk:
        pages = (0,) * -(-(start + count) // self._page_size)
        tokens = () if start else (0,) * count
        return Chunk(seat, slot, start, count, tokens, pages, (seat,))

    def _run(
        self,
        chunks: Sequence[Chunk],
        capture: bool,
        late: LateInputs = _NOTHING_LATE,
        context: int = 1,
        first_wish: int = 0,
    ) -> None:
        """Args: context, tokens of each sequence as its seat's opening names them; first_wish, in
        _SAMPLING, of seat 0."""
        self._step -= 1
        prompt = (0,) * context
        openings = tuple(
            SeatOpening(chunk.seat, _SAMPLING[(first_wish + chunk.seat) % len(_SAMPLING)], 0,
                        prompt, (0,))
            for chunk in chunks[: len(chunks) if context == 1 else len(_SAMPLING)]
        )  # fmt: skip
        plan = StepPlan(self._step, Chunks.of(chunks), openings)
        self._runner.forward(plan)
        self._runner.sample(plan, late)
        self._runner.collect(plan.step)
        if capture:
            self._runner.capture(plan)
