"""What the sampler remembers of each seat on the device: last token, output counts, prompt mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_svc.types import SamplingParams, SeatOpening


@dataclass(frozen=True, slots=True)
class SeatParams:
    """The host's side of an open seat."""

    sampling: SamplingParams
    choice: int
    prompt_tokens: int

    @property
    def counts_tokens(self) -> bool:
        s = self.sampling
        return (
            s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        )


class SeatState:
    """One row a seat. Counts and masks are kept only for seats with a penalty."""

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        #: [seats] int64, the input of the seat's next decode
        self.last_token = torch.zeros(num_seats, dtype=torch.int64, device=device)
        #: [seats, V] int32
        self.output_counts = torch.zeros((num_seats, vocab_size), dtype=torch.int32, device=device)
        #: [seats, V] bool
        self.prompt_mask = torch.zeros((num_seats, vocab_size), dtype=torch.bool, device=device)
        self._params: dict[int, SeatParams] = {}

    def open(self, opening: SeatOpening) -> None:
        """Reset a seat for a sequence, new or back after a preemption."""
        seat, device = opening.seat, self.last_token.device
        params = SeatParams(opening.sampling, opening.choice, len(opening.prompt_token_ids))
        self._params[seat] = params
        if opening.output_token_ids:
            self.last_token[seat] = opening.output_token_ids[-1]
        if params.counts_tokens:
            prompt = torch.tensor(opening.prompt_token_ids, dtype=torch.int64, device=device)
            outputs = torch.tensor(opening.output_token_ids, dtype=torch.int64, device=device)
            self.prompt_mask[seat].zero_().index_fill_(0, prompt, True)
            ones = torch.ones_like(outputs, dtype=torch.int32)
            self.output_counts[seat].zero_().index_add_(0, outputs, ones)

    @property
    def num_bytes(self) -> int:
        tensors = (self.last_token, self.output_counts, self.prompt_mask)
        return sum(tensor.nbytes for tensor in tensors)

    def params(self, seat: int) -> SeatParams:
        """A seat that was never opened is our bug: KeyError."""
        return self._params[seat]

    def commit(self, seats: Sequence[int], tokens: torch.Tensor) -> None:
        """Remember sampled tokens [n] int64, all of them valid ids."""
        device = self.last_token.device
        self.last_token.index_copy_(0, torch.tensor(seats, device=device), tokens)
        counted = [i for i, seat in enumerate(seats) if self._params[seat].counts_tokens]
        if counted:
            rows = torch.tensor([seats[i] for i in counted], device=device)
            picked = tokens[torch.tensor(counted, device=device)]
            one = torch.ones(1, dtype=torch.int32, device=device)
            self.output_counts.index_put_((rows, picked), one, accumulate=True)
