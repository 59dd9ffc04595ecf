"""Drives a model's Runner with hand-made plans: no scheduler, one sequence a seat."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_svc.model.build import LoadedModel, ModelOptions, load_model
from engine_svc.model.gpu.runner import GpuRunner
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
    HostSpan,
    LateInputs,
    Sample,
    SamplingParams,
    SeatOpening,
    SlotBinding,
    SlotLoad,
    StepPlan,
    StepResult,
)

NOTHING_LATE = LateInputs()
#: a CPU's own way through a step; the GPU's on CPU tensors; the GPU's with graphs
WAYS = ("eager", "static", pytest.param("cuda", marks=pytest.mark.gpu))
WAY_OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {},
    "static": {"static_buffers": True},
    "cuda": {"device": "cuda", "dtype": "float32"},
}
#: of logits of tiny models in fp32; a GPU sums products in another order at every shape
WAY_TOLERANCE = {"cuda": 1e-3, **dict.fromkeys(("eager", "static", "kernels", "cpu"), 1e-4)}


@dataclass
class SeatedSequence:
    """One sequence at a seat."""

    seat: int
    slot: int
    prompt: list[int]
    sampling: SamplingParams
    choice: int = 0
    outputs: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    #: with DirectRunner.record_logits
    logits: list[torch.Tensor] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    opened: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs


class DirectRunner:
    """A loaded model, its free pages, and adapters written through the real slot writer."""

    def __init__(
        self, model_dir: Path, packed: Mapping[str, bytes] | None = None, **options: object
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        region = Path(self._folder.name) / "region"
        self.spans: dict[str, HostSpan] = {}
        with region.open("wb") as file:
            file.write(bytes(4096))
            for digest, payload in (packed or {}).items():
                self.spans[digest] = HostSpan(file.tell(), len(payload))
                file.write(payload)
                file.write(bytes(-len(payload) % 4096))
        self.loaded: LoadedModel = load_model(
            model_dir,
            ModelOptions(host_region_path=str(region), **{"device": "cpu", **options}),  # type: ignore[arg-type]
        )
        self.runner = self.loaded.runner
        self.free = list(range(self.loaded.num_pages))
        self.step = 0
        self._bindings: list[SlotBinding] = []
        self._last_logits: torch.Tensor | None = None

    def record_logits(self) -> None:
        """From now on each sequence keeps the logits row of every token it sampled."""
        if isinstance(self.runner, GpuRunner):
            self._record_launches(self.runner)
            return
        model: Any = self.runner._model
        compute = model.logits

        def recording(hidden: torch.Tensor, segments: object) -> torch.Tensor:
            self._last_logits = compute(hidden, segments)
            return self._last_logits

        model.logits = recording

    def _record_launches(self, runner: GpuRunner) -> None:
        sampler: Any = runner._sampler
        launch = sampler.launch

        def recording(logits: torch.Tensor, *others: object) -> object:
            # the buffer is written again by the next step
            self._last_logits = logits.float().cpu().clone()
            return launch(logits, *others)

        sampler.launch = recording

    def close(self) -> None:
        self.loaded.slot_writer.close()
        self._folder.cleanup()

    def load_slot(self, slot: int, digest: str, num_pages: int) -> tuple[int, ...]:
        """Copy a packed adapter into pages; bound by the next step. Returns the pages."""
        if isinstance(self.runner, GpuRunner):
            self.runner.wait()  # tests write the arena on another stream
        pages = tuple(self.free.pop() for _ in range(num_pages))
        writer = self.loaded.slot_writer
        writer.start(SlotLoad(slot, digest, self.spans[digest], pages))
        deadline = time.monotonic() + 30
        while not (ended := writer.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert ended[0][1] is None, ended
        self._bindings.append(SlotBinding(slot, digest, pages))
        return pages

    def run(
        self, work: Iterable[tuple[SeatedSequence, int]], *, prompt_logprobs: int | None = None,
        late: LateInputs = NOTHING_LATE, run_ahead: int = 0,
    ) -> StepResult:  # fmt: skip
        """One step: (sequence, tokens to compute). Samples are appended to their sequences."""
        plan, sampling = self.plan(work, prompt_logprobs, run_ahead)
        self.runner.forward(plan)
        self.runner.sample(plan, late)
        result = self.runner.collect(plan.step)
        for sample, sequence in zip(result.samples, sampling, strict=True):
            assert sample.seat == sequence.seat
            sequence.samples.append(sample)
            sequence.outputs.append(sample.token_id)
        if self._last_logits is not None and sampling:
            for sequence, row in zip(sampling, self._last_logits, strict=True):
                sequence.logits.append(row)
        return result

    def plan(
        self,
        work: Iterable[tuple[SeatedSequence, int]],
        prompt_logprobs: int | None,
        run_ahead: int,
    ) -> tuple[StepPlan, list[SeatedSequence]]:
        chunks, openings, sampling = [], [], []
        ordered = sorted(work, key=lambda pair: (pair[0].slot == NO_SLOT, pair[0].slot))
        for sequence, num_tokens in ordered:
            if not sequence.opened:
                openings.append(
                    SeatOpening(
                        sequence.seat, sequence.sampling, sequence.choice,
                        tuple(sequence.prompt), tuple(sequence.outputs),
                    )
                )  # fmt: skip
                sequence.opened = True
            chunks.append(self._chunk(sequence, num_tokens, prompt_logprobs))
            if chunks[-1].sample_seats:
                sampling.append(sequence)
        self.step += 1
        bindings, self._bindings = tuple(self._bindings), []
        return (
            StepPlan(self.step, Chunks.of(chunks), tuple(openings), bindings, run_ahead=run_ahead),
            sampling,
        )

    def _chunk(
        self, sequence: SeatedSequence, num_tokens: int, prompt_logprobs: int | None
    ) -> Chunk:
        start, end = sequence.computed, sequence.computed + num_tokens
        while len(sequence.pages) * self.loaded.page_size < end:
            sequence.pages.append(self.free.pop())
        tokens = sequence.tokens
        # a decode takes its input from the seat: the last output, or one not yet collected
        is_decode = num_tokens == 1 and start >= len(tokens) - 1 and bool(sequence.outputs)
        following = tokens[end] if end < len(sequence.prompt) else -1
        wants_prompt = prompt_logprobs is not None and start < len(sequence.prompt)
        sequence.computed = end
        return Chunk(
            sequence.seat, sequence.slot, start, num_tokens,
            () if is_decode else tuple(tokens[start:end]),
            tuple(sequence.pages[: -(-end // self.loaded.page_size)]),
            (sequence.seat,) if end >= len(tokens) else (),
            prompt_logprobs if wants_prompt else None, following,
        )  # fmt: skip

    def generate(
        self, sequences: Sequence[SeatedSequence], num_tokens: int, chunk: int = 10**6
    ) -> None:
        """Prefill in chunks, then decode together until each has num_tokens outputs."""
        while True:
            work = [
                (s, min(chunk, len(s.tokens) - s.computed))
                for s in sequences
                if len(s.outputs) < num_tokens
            ]
            if not work:
                return
            self.run(work)

    def follow(self, sequence: SeatedSequence, tokens: Sequence[int]) -> None:
        """Alone in each step, sample these tokens whatever the logits say."""
        num_bytes = -(-self.loaded.base.vocab_size // 8)
        for token in tokens:
            mask = (1 << token).to_bytes(num_bytes, "little")
            work = [(sequence, len(sequence.tokens) - sequence.computed)]
            self.run(work, late=LateInputs(((sequence.seat, mask),)))
            assert sequence.outputs[-1] == token

    def release(self, sequence: SeatedSequence) -> None:
        """Preempt: give the pages back; the sequence will be opened again."""
        self.free.extend(sequence.pages)
        sequence.pages.clear()
        sequence.computed, sequence.opened = 0, False
