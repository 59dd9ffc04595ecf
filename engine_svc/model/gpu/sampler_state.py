"""What the GPU's sampler remembers of each seat, written when a sequence takes the seat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.model.gpu.staging import StagingRing
from engine_svc.model.seats import SeatParams
from engine_svc.types import SamplingParams, SeatOpening
from kernels import sample_tables as tables
from kernels.sample_tables import SeatTable

#: an inverse temperature above this would make inf · 0
_LARGEST_INVERSE = 1e30
#: seats with lists that may open before the copy of the first one must be done
_OPENINGS = 8


class SamplerState:
    """A `SeatTable` on the device and its mirror on the host.

    Openings are copies and writes on the current stream from page-locked memory. Nothing waits for
    the device but an opening with penalties, bias or bans for the copy of the eighth such before.
    """

    def __init__(
        self, num_seats: int, vocab_size: int, context_tokens: int, device: torch.device
    ) -> None:
        shape = (num_seats, vocab_size)
        self.vocab_size = vocab_size
        self.table = SeatTable(
            words=torch.zeros((num_seats, tables.SEAT_WORDS), dtype=torch.int32, device=device),
            tally=torch.zeros(shape, dtype=torch.int32, device=device),
            bias=torch.zeros(shape, dtype=torch.float32, device=device),
            last_token=torch.zeros(num_seats, dtype=torch.int32, device=device),
        )
        self._mirror = np.zeros((num_seats, tables.SEAT_WORDS), np.int32)
        self._rows = StagingRing(3, self._mirror.size, device)
        # a sequence, its stopping tokens and its biases with their values
        capacity = context_tokens + 3 * vocab_size + 1
        self._lists = StagingRing(_OPENINGS, capacity, device)
        self._received = torch.zeros(capacity, dtype=torch.int32, device=device)
        bits = torch.tensor([tables.MAY_NOT_COME, tables.ONE_OUTPUT], dtype=torch.int32)
        bits = bits.to(device)
        self._may_not_come, self._one_output = bits[:1], bits[1:]
        self._params: dict[int, SeatParams] = {}

    @property
    def num_bytes(self) -> int:
        t = self.table
        kept = (t.words, t.tally, t.bias, t.last_token, self._received)
        return sum(tensor.nbytes for tensor in kept)

    def params(self, seat: int) -> SeatParams:
        """A seat that was never opened is our bug: KeyError."""
        return self._params[seat]

    def flags(self, seats: Sequence[int]) -> npt.NDArray[np.int32]:
        """[n] FLAGS of these seats."""
        found: npt.NDArray[np.int32] = self._mirror[np.asarray(seats, np.int64), tables.FLAGS]
        return found

    def open(self, openings: Sequence[SeatOpening]) -> None:
        """Reset seats for sequences, new or back after a preemption."""
        if not openings:
            return
        for opening in openings:
            params = SeatParams(opening.sampling, opening.choice, len(opening.prompt_token_ids))
            self._params[opening.seat] = params
            self._mirror[opening.seat] = seat_words(params, self.vocab_size)
            self._write_lists(opening, int(self._mirror[opening.seat, tables.FLAGS]))
        index = self._rows.acquire()
        self._rows.arrays[index] = self._mirror.reshape(-1)
        self._rows.copy_to(self.table.words.view(-1), self._mirror.size)

    def _write_lists(self, opening: SeatOpening, flags: int) -> None:
        """Tally, bias and last token of a seat that needs them."""
        counted, banned = flags & tables.PENALISED, flags & tables.BANNED
        biases = [b for b in opening.sampling.logit_bias if b[0] < self.vocab_size]
        parts: dict[str, Sequence[int] | npt.NDArray[np.int32]] = {
            "last": opening.output_token_ids[-1:],
            "prompt": opening.prompt_token_ids if counted else (),
            "outputs": opening.output_token_ids if counted else (),
            "banned": _stopping(opening.sampling, self.vocab_size) if banned else (),
            "biased": [token for token, _ in biases],
            "bias": np.array([value for _, value in biases], np.float32).view(np.int32),
        }
        if not any(len(part) for part in parts.values()):
            return
        staged = self._lists.arrays[self._lists.acquire()]
        received: dict[str, torch.Tensor] = {}
        filled = 0
        for name, part in parts.items():
            staged[filled : filled + len(part)] = part
            received[name] = self._received[filled : filled + len(part)]
            filled += len(part)
        self._lists.copy_to(self._received, filled)
        table, seat = self.table, opening.seat
        if opening.output_token_ids:
            table.last_token[seat : seat + 1].copy_(received["last"])
        if counted or banned:
            tally = table.tally[seat].zero_()
            tally.index_fill_(0, received["prompt"].long(), tables.IN_PROMPT)
            for name, bit in (("banned", self._may_not_come), ("outputs", self._one_output)):
                at = received[name].long()
                tally.index_add_(0, at, bit.expand(len(at)))
        if flags & tables.BIASED:
            values = received["bias"].view(torch.float32)
            table.bias[seat].zero_().index_copy_(0, received["biased"].long(), values)


def seat_words(params: SeatParams, vocab_size: int) -> npt.NDArray[np.int32]:
    """[SEAT_WORDS], see kernels.sample_tables."""
    s = params.sampling
    cut = 0 < s.top_k < vocab_size or s.top_p < 1.0 or s.min_p > 0.0
    drawn = s.temperature > 0
    words = np.zeros(tables.SEAT_WORDS, np.int32)
    words[tables.FLAGS] = (
        tables.PENALISED * params.counts_tokens
        | tables.BIASED * any(token < vocab_size for token, _ in s.logit_bias)
        | tables.BANNED * (s.min_tokens > 0 and len(_stopping(s, vocab_size)) > 0)
        | tables.DRAWN * drawn
        | tables.CUT * (drawn and cut)
        | tables.RANKED * (s.logprobs is not None)
    )
    floats = words.view(np.float32)
    floats[tables.INVERSE_TEMPERATURE] = min(1.0 / s.temperature, _LARGEST_INVERSE) if drawn else 0
    floats[tables.TOP_P], floats[tables.MIN_P] = s.top_p, s.min_p
    floats[tables.REPETITION] = s.repetition_penalty
    floats[tables.PRESENCE], floats[tables.FREQUENCY] = s.presence_penalty, s.frequency_penalty
    words[tables.TOP_K] = min(s.top_k or vocab_size, vocab_size)
    words[tables.BANNED_UNTIL] = min(params.prompt_tokens + s.min_tokens, 2**31 - 1)
    return words


def _stopping(sampling: SamplingParams, vocab_size: int) -> list[int]:
    """Each token that ends the sequence, once."""
    ids = dict.fromkeys(sampling.eos_token_ids + sampling.stop_token_ids)
    return [token for token in ids if token < vocab_size]
