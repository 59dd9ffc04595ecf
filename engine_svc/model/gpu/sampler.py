"""From logits to tokens on the GPU, without waiting for it: engine_svc.model.sampler's semantics.

A step is `stage` (seats, positions and random numbers, host → device), `enqueue` (the kernels: may
stand in a captured graph, behind the head's GEMM), `finish` (log probabilities where asked, results
device → page-locked memory), later `take`. `launch` is all but the last in one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.model.gpu.sampler_state import SamplerState
from engine_svc.model.gpu.staging import StagingRing
from engine_svc.model.randomness import uniform
from engine_svc.types import SeatOpening, TokenLogprobs
from kernels.rank_tokens import MAX_TOP, rank_tokens
from kernels.sample import SampleScratch, sample
from kernels.sample_tables import SampleRows, SeatTable


@dataclass(frozen=True, slots=True)
class PendingSample:
    """Results on their way to the host; valid until `ring_depth` later steps were finished.

    `tops[i]`: None, or how many most likely tokens row i reports.
    """

    buffer: int
    tops: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class TakenSample:
    """Tokens of the rows, −1: not finite, or no token allowed; log probabilities by row."""

    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]


class GpuSampler:
    """Draws one token a row and remembers it in the seats' state, all on the device."""

    def __init__(
        self,
        state: SamplerState,
        max_rows: int,
        device: torch.device,
        *,
        ring_depth: int = 3,
        inputs: torch.Tensor | None = None,
    ) -> None:
        """Args:
        max_rows: most rows of logits in one step.
        ring_depth: steps in flight + 2.
        inputs: [num_inputs(max_rows)] int32 on the device at a 16-byte boundary, if the caller
            copies what `fill` wrote itself; None: `stage` copies it.
        """
        raise NotImplementedError

    @staticmethod
    def num_inputs(max_rows: int) -> int:
        """Numbers of the staged block: numbers [N] fp64, seats [N], positions [N], asked [N]."""
        return 5 * max_rows

    def open(self, openings: Sequence[SeatOpening]) -> None:
        """Before the forward of the step that opens these seats; on the compute stream."""
        raise NotImplementedError

    @property
    def last_token(self) -> torch.Tensor:
        """[seats] int32 on the device: input of a seat's next decode."""
        raise NotImplementedError

    def fill(
        self, staged: npt.NDArray[np.int32], seats: Sequence[int], positions: Sequence[int]
    ) -> None:
        """Write the step's inputs into host memory [num_inputs(max_rows)] of the caller, who copies
        it to `inputs` before the kernels run. Rows behind the last seat become padding.

        Args: seats, positions of the rows; a position counts the tokens before the one to sample.
        """
        raise NotImplementedError

    def stage(self, seats: Sequence[int], positions: Sequence[int]) -> None:
        """`fill` into a page-locked buffer of its own, and the copy."""
        raise NotImplementedError

    def enqueue(self, logits: torch.Tensor) -> None:
        """The kernels over all rows of logits [N ≤ max_rows, V], compute dtype or fp32, last
        dimension contiguous; rows whose staged seat is −1 do nothing. Launches only: no allocation,
        nothing that depends on the step, so it may be captured. Not for steps with token masks.
        """
        raise NotImplementedError

    def finish(
        self, logits: torch.Tensor, seats: Sequence[int], enqueued: bool = True
    ) -> PendingSample:
        """After `enqueue` or the replay that holds it: log probabilities of rows that ask, and the
        copy to the host."""
        raise NotImplementedError

    def launch(
        self,
        logits: torch.Tensor,
        seats: Sequence[int],
        positions: Sequence[int],
        token_masks: Mapping[int, bytes],
    ) -> PendingSample:
        """stage, the kernels and finish; token_masks by seat as in engine_svc.types.LateInputs."""
        raise NotImplementedError

    def take(self, pending: PendingSample) -> TakenSample:
        """Waits for the step; steps are taken in order, each once."""
        raise NotImplementedError
