"""What the simulator and its policies share: jobs, what a step did, and what a step costs.

Simulated seconds. All policies pay the same for a step: they differ in whom it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: (sequences in a step, ms): the base model's step, Llama-3.1-8B shape in bf16 on one H200, as
#: measured of the field's engine with graphs; linear between the points.
BASE_STEP_MS = ((1, 4.86), (8, 5.07), (32, 5.73), (64, 6.63), (128, 8.44), (256, 13.5))
#: Rank-16 LoRA forked beside the base GEMMs, which stores a delta: a step's constant, each distinct
#: adapter, and each sequence that shares an adapter. Fitted to 32 layers of measured 2.5, 10.8,
#: 15.4, 51.4, 58 and 196 µs (1/1, 8/8, 64/8, 64/64, 256/22 and 256/256 sequences/adapters), within
#: 2.4 µs each.
LORA_STEP_MS, LORA_ADAPTER_MS, LORA_SHARING_MS = 0.081, 0.0242, 0.0052
#: 256 prompts of 512 tokens without an adapter: 3.07 s. LoRA adds 327 to 366 µs a layer, and 85 for
#: the consumer, to 8,192 tokens.
PROMPT_TOKEN_MS = 0.0234 + 0.0017
#: One pinned copy of a rank-16 adapter (83.9 MB) beside the steps, which it slows by a tenth.
COPY_S, COPY_SLOWDOWN = 0.0017, 0.1
#: The field brings an adapter into a slot inside the step.
SWAP_IN_STEP_S = 0.0163


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `flow` is its adapter's number."""

    number: int
    flow: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine that all policies drive."""

    max_loras: int
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(slots=True)
class StepFacts:
    """One step. `served` is service (prompt tokens + 2 × decoded ones) by flow."""

    served: dict[int, int]
    batch: int
    swaps: int
    pauses: int
    finished: Sequence[Job]
    #: simulated time at its end
    now_s: float


class Policy(Protocol):
    """A scheduler under the simulator."""

    def submit(self, job: Job) -> None: ...

    def step(self) -> StepFacts:
        """One step; `batch` 0: nothing could run, only time passed."""
        ...


def step_s(batch: int, adapters: int, prompt_tokens: int) -> float:
    """Seconds of a step with so many sequences, distinct adapters and prompt tokens."""
    ms = _base_ms(batch) + PROMPT_TOKEN_MS * prompt_tokens
    if adapters:
        sharing = max(0, batch - adapters)
        ms += LORA_STEP_MS + LORA_ADAPTER_MS * adapters + LORA_SHARING_MS * sharing
    return ms / 1000.0


def _base_ms(batch: int) -> float:
    below = BASE_STEP_MS[0]
    for point in BASE_STEP_MS:
        if batch <= point[0]:
            share = (batch - below[0]) / max(1, point[0] - below[0])
            return below[1] + max(0.0, share) * (point[1] - below[1])
        below = point
    return below[1] * batch / below[0]
