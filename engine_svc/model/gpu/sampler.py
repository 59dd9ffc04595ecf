"""From logits to tokens on the GPU, without waiting for it: engine_svc.model.sampler's semantics.

A step is `stage` (seats, positions and random numbers, host → device), `enqueue` (the kernels: may
stand in a captured graph, behind the head's GEMM), `finish` (log probabilities where asked, results
device → page-locked memory), later `take`. `launch` is all but the last in one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine_svc.model.gpu.sampler_results import PendingSample, SampleResults, TakenSample
from engine_svc.model.gpu.sampler_state import SamplerState
from engine_svc.model.gpu.staging import StagingRing
from engine_svc.model.randomness import uniform
from engine_svc.types import SeatOpening
from kernels.rank_tokens import rank_scratch, rank_tokens
from kernels.sample import sample, sample_scratch
from kernels.sample_tables import CUT, DRAWN, RANKED, SampleRows

__all__ = ["GpuSampler", "PendingSample", "TakenSample"]

#: int32 numbers a row of the staged block: a number of fp64, seat, position, and the row itself if
#: it asks for log probabilities
_WORDS = 5


class GpuSampler:
    """Draws one token a row and remembers it in the seats' state, all on the device.

    On CPU tensors the kernels' references run, and everything has happened when a call returns.
    """

    def __init__(
        self,
        state: SamplerState,
        max_rows: int,
        device: torch.device,
        *,
        ring_depth: int = 3,
    ) -> None:
        """Args:
        max_rows: most rows of logits in one step.
        ring_depth: steps in flight + 2.
        """
        self.state, self._max_rows = state, max_rows
        size = _WORDS * max_rows
        inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._inputs, self._ring = inputs, StagingRing(ring_depth, size, device)
        wide, n = inputs[: 2 * max_rows].view(torch.float64), max_rows
        seats, positions, self._asking = (inputs[at * n : (at + 1) * n] for at in (2, 3, 4))
        self._rows = SampleRows(seats, positions, wide)
        # a mask a row, and which row has which
        self._mask_words = -(-state.vocab_size // 32)
        num_masks = max_rows * self._mask_words
        self._masks = torch.zeros(max_rows + num_masks, dtype=torch.int32, device=device)
        self._mask_ring = StagingRing(ring_depth, max_rows + num_masks, device)
        self.scratch = sample_scratch(max_rows, state.vocab_size, device)
        self._ranks = rank_scratch(max_rows, state.vocab_size, device)
        self._results = SampleResults(max_rows, ring_depth, device)

    @property
    def num_bytes(self) -> int:
        """On the device, seats included."""
        own = self._inputs.nbytes + self._masks.nbytes + self._results.num_bytes
        parts = (self.scratch, self._ranks)
        scratch = sum(getattr(part, name).nbytes for part in parts for name in part.__slots__)
        return int(self.state.num_bytes + own + scratch)

    def open(self, openings: Sequence[SeatOpening]) -> None:
        """Before the forward of the step that opens these seats; on the compute stream."""
        self.state.open(openings)

    @property
    def last_token(self) -> torch.Tensor:
        """[seats] int32 on the device: input of a seat's next decode."""
        return self.state.table.last_token

    def stage(self, seats: Sequence[int], positions: Sequence[int]) -> None:
        """Fill a page-locked block and copy it to the device. Rows behind the last seat become
        padding.

        Args: seats, positions of the rows; a position counts the tokens before the one to sample.
        """
        n, count = self._max_rows, len(seats)
        staged = self._ring.arrays[self._ring.acquire()]
        flags = self.state.flags(seats)
        numbers = staged[: 2 * n].view(np.float64)
        for row in (flags & DRAWN).nonzero()[0].tolist():
            p = self.state.params(seats[row])
            numbers[row] = uniform(p.sampling.seed, p.choice, positions[row])
        staged[2 * n : 2 * n + count] = seats
        staged[2 * n + count : 3 * n] = -1
        staged[3 * n : 3 * n + count] = positions
        asking = (flags & RANKED).nonzero()[0]
        staged[4 * n : 4 * n + len(asking)] = asking
        self._ring.copy_to(self._inputs, len(self._inputs))

    def enqueue(self, logits: torch.Tensor, cut: bool = True) -> None:
        """The kernels over all rows of logits [N ≤ max_rows, V], compute dtype or fp32, last
        dimension contiguous; rows whose staged seat is −1 do nothing. Launches only: no allocation,
        nothing that depends on the step, so it may be captured. Not for steps with token masks.

        Args: cut: whether some row may have top_k, top_p or min_p (kernels.sample_tables.CUT).
        """
        self._sample(logits, self.rows(cut))

    def rows(self, cut: bool) -> SampleRows:
        """The staged rows, on the device."""
        rows = self._rows
        return SampleRows(rows.seats, rows.positions, rows.numbers, cut=cut)

    @property
    def tokens(self) -> torch.Tensor:
        """[max_rows] int32 on the device: what the last kernels drew."""
        return self._results.tokens

    def finish(self, logits: torch.Tensor, seats: Sequence[int]) -> PendingSample:
        """After `enqueue` or the replay that holds it: log probabilities of rows that ask, and the
        copy to the host."""
        wishes = [self.state.params(seat).sampling.logprobs for seat in seats]
        vocab_size = self.state.vocab_size
        tops = tuple([None if wish is None else min(wish, vocab_size) for wish in wishes])
        asked = [top for top in tops if top is not None]
        results = self._results
        if asked:
            rank_tokens(
                logits, self._asking[: len(asked)], results.tokens, max(asked), self._ranks,
                results.chosen, results.top_ids, results.top_values,
            )  # fmt: skip
        return results.send(tops)

    def launch(
        self,
        logits: torch.Tensor,
        seats: Sequence[int],
        positions: Sequence[int],
        token_masks: Mapping[int, bytes],
    ) -> PendingSample:
        """stage, the kernels and finish; token_masks by seat as in engine_svc.types.LateInputs."""
        self.stage(seats, positions)
        cut = bool((self.state.flags(seats) & CUT).any())
        masked = [(row, token_masks[seat]) for row, seat in enumerate(seats) if seat in token_masks]
        if masked:
            self._sample(logits, self._masked_rows(masked, cut))
        else:
            self.enqueue(logits, cut)
        return self.finish(logits, seats)

    def take(self, pending: PendingSample) -> TakenSample:
        """Waits for the step; steps are taken in order, each once."""
        return self._results.take(pending)

    def _sample(self, logits: torch.Tensor, rows: SampleRows) -> None:
        sample(logits, rows, self.state.table, self.scratch, self._results.tokens)

    def _masked_rows(self, masked: Sequence[tuple[int, bytes]], cut: bool) -> SampleRows:
        staged = self._mask_ring.arrays[self._mask_ring.acquire()]
        of_row, words = staged[: self._max_rows], self._mask_words
        of_row[:] = -1
        masks = staged[self._max_rows :].reshape(-1, words)
        for index, (row, mask) in enumerate(masked):
            of_row[row] = index
            room = masks[index].view(np.uint8)
            bits = np.frombuffer(mask, np.uint8)[: len(room)]
            room[: len(bits)], room[len(bits) :] = bits, 0
        self._mask_ring.copy_to(self._masks, self._max_rows + len(masked) * words)
        rows, on_device = self._rows, self._masks[self._max_rows :].view(-1, words)
        return SampleRows(
            rows.seats, rows.positions, rows.numbers, on_device, self._masks[: self._max_rows], cut
        )
