"""Tokens and log probabilities of a step, on the device and on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine_svc.types import TokenLogprobs
from kernels.rank_tokens import MAX_TOP

#: int32 numbers a row: token, log probability, most likely tokens and theirs
_WORDS = 2 + 2 * MAX_TOP


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


class SampleResults:
    """One block on the device, written by every step, and a ring of page-locked copies.

    tokens [N] int32, chosen [N] fp32; top_ids [N, MAX_TOP] int32 and top_values [N, MAX_TOP] fp32
    of the rows that ask, in their order.
    """

    def __init__(self, max_rows: int, ring_depth: int, device: torch.device) -> None:
        n, size = max_rows, _WORDS * max_rows
        self._max_rows, self._on_gpu = n, device.type == "cuda"
        self._block = torch.zeros(size, dtype=torch.int32, device=device)
        self.tokens = self._block[:n]
        self.chosen = self._block[n : 2 * n].view(torch.float32)
        tops = self._block[2 * n :].view(2, n, MAX_TOP)
        self.top_ids, self.top_values = tops[0], tops[1].view(torch.float32)
        shape = (ring_depth, size)
        self._copies = torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_gpu)
        self._arrays = self._copies.numpy()
        num_events = ring_depth if self._on_gpu else 0
        self._arrived = [torch.cuda.Event() for _ in range(num_events)]  # type: ignore[no-untyped-call]
        self._next = 0

    @property
    def num_bytes(self) -> int:
        return self._block.nbytes

    def send(self, tops: tuple[int | None, ...]) -> PendingSample:
        """Copy to the host on the current stream; no more than the rows asked for."""
        buffer, self._next = self._next, (self._next + 1) % len(self._arrays)
        asked = any(top is not None for top in tops)
        count = len(self._block) if asked else len(tops)
        self._copies[buffer, :count].copy_(self._block[:count], non_blocking=True)
        if self._on_gpu:
            self._arrived[buffer].record()
        return PendingSample(buffer, tops)

    def take(self, pending: PendingSample) -> TakenSample:
        """Waits for the copy."""
        if self._on_gpu:
            self._arrived[pending.buffer].synchronize()
        array, n = self._arrays[pending.buffer], self._max_rows
        tokens: list[int] = array[: len(pending.tops)].tolist()
        asking = [(row, top) for row, top in enumerate(pending.tops) if top is not None]
        if not asking:
            return TakenSample(tokens, {})
        chosen = array[n : n + len(asking)].view(np.float32).tolist()
        ids, values = array[2 * n :].reshape(2, n, MAX_TOP)[:, : len(asking)]
        logprobs = {}
        for index, (row, top) in enumerate(asking):
            logps = values[index, :top].view(np.float32).tolist()
            best = tuple(zip(ids[index, :top].tolist(), logps, strict=True))
            logprobs[row] = TokenLogprobs(tokens[row], chosen[index], best)
        return TakenSample(tokens, logprobs)
