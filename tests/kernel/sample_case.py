"""Random steps for the sampling kernels, and what a token must satisfy whatever the rounding.

Tensors are made on the CPU; seats that no row names hold canaries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kernels import sample_tables as tables
from kernels.sample import sample_scratch
from kernels.sample_tables import SampleRows, SeatTable

CANARY = -77


@dataclass(frozen=True)
class Wish:
    """A seat's parameters as kernels.sample_tables has them; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    banned_until: int = 0
    prompt: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    bias: dict[int, float] = field(default_factory=dict)

    def words(self, vocab: int) -> np.ndarray:
        cut = 0 < self.top_k < vocab or self.top_p < 1 or self.min_p > 0
        penalised = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
        words = np.zeros(tables.SEAT_WORDS, np.int32)
        words[tables.FLAGS] = (
            tables.DRAWN * (self.temperature > 0)
            | tables.CUT * (self.temperature > 0 and cut)
            | tables.PENALISED * penalised
            | tables.BIASED * bool(self.bias)
            | tables.BANNED * bool(self.banned)
        )
        floats = words.view(np.float32)
        floats[tables.INVERSE_TEMPERATURE] = 1 / self.temperature if self.temperature else 0
        floats[tables.TOP_P], floats[tables.MIN_P] = self.top_p, self.min_p
        floats[tables.REPETITION] = self.repetition
        floats[tables.PRESENCE], floats[tables.FREQUENCY] = self.presence, self.frequency
        words[tables.TOP_K] = min(self.top_k or vocab, vocab)
        words[tables.BANNED_UNTIL] = self.banned_until
        return words


@dataclass
class SampleCase:
    logits: torch.Tensor
    rows: SampleRows
    table: SeatTable
    tokens: torch.Tensor

    def to(self, device: str) -> SampleCase:
        """A copy there."""

        def copy(part: Any) -> Any:
            names = part.__dataclass_fields__
            values = {name: getattr(part, name) for name in names}
            tensors = {
                name: value.to(device, copy=True)
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            }
            return replace(part, **tensors)

        # the rows of a larger buffer, so that a row does not begin where the one before ends
        wide = torch.full((len(self.logits), self.logits.shape[1] + 8), torch.nan)
        wide = wide.to(self.logits.dtype)
        wide[:, : self.logits.shape[1]] = self.logits
        logits = wide.to(device)[:, : self.logits.shape[1]]
        return SampleCase(logits, copy(self.rows), copy(self.table), self.tokens.to(device).clone())

    def scratch(self) -> Any:
        return sample_scratch(len(self.logits), self.logits.shape[1], self.logits.device)


def sample_case(
    logits: torch.Tensor,
    wishes: list[Wish | None],
    *,
    seed: int = 0,
    masks: dict[int, list[int]] | None = None,
) -> SampleCase:
    """Row i samples for wishes[i], None = padding; masks: allowed tokens by row."""
    vocab, count = logits.shape[1], len(wishes)
    random = torch.Generator().manual_seed(seed)
    seats = torch.randperm(count + 2, generator=random)[:count].int()
    table = SeatTable(
        torch.full((count + 2, tables.SEAT_WORDS), CANARY, dtype=torch.int32),
        torch.full((count + 2, vocab), CANARY, dtype=torch.int32),
        torch.full((count + 2, vocab), torch.nan),
        torch.full((count + 2,), CANARY, dtype=torch.int32),
    )
    for row, wish in enumerate(wishes):
        seat = int(seats[row])
        if wish is None:
            seats[row] = -1
            continue
        table.words[seat] = torch.from_numpy(wish.words(vocab))
        flags = int(table.words[seat, tables.FLAGS])
        if flags & (tables.PENALISED | tables.BANNED):
            table.tally[seat] = 0
            table.tally[seat, list(wish.prompt)] |= tables.IN_PROMPT
            table.tally[seat, list(wish.banned)] |= tables.MAY_NOT_COME
            for token in wish.outputs:
                table.tally[seat, token] += tables.ONE_OUTPUT
        if flags & tables.BIASED:
            table.bias[seat] = 0.0
            table.bias[seat, list(wish.bias)] = torch.tensor(list(wish.bias.values()))
    numbers = torch.rand(count, generator=random, dtype=torch.float64)
    positions = torch.full((count,), 10, dtype=torch.int32)
    rows = SampleRows(seats, positions, numbers)
    if masks is not None:
        bits = np.zeros((len(masks) + 1, -(-vocab // 32) * 32), np.uint8)
        of_row = torch.full((count,), -1, dtype=torch.int32)
        for index, (row, allowed) in enumerate(masks.items()):
            of_row[row] = index
            bits[index, allowed] = 1
        words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
        rows = replace(rows, token_masks=words, mask_of_row=of_row)
    return SampleCase(logits, rows, table, torch.full((count,), CANARY, dtype=torch.int32))


def allowed_by_rounding(weights: torch.Tensor, threshold: float, number: float, token: int) -> bool:
    """Whether a token is the one drawn when each sum and threshold may be off by a few fp32 units.

    Args: weights [V] of one row, the largest 1; kept are those ≥ threshold.
    """
    slack = 1e-5
    exact = weights.double()
    surely = exact * (exact >= threshold * (1 + slack))
    perhaps = exact * (exact >= threshold * (1 - slack))
    if perhaps[token] == 0:
        return False
    most, least = perhaps.sum() * (1 + slack), surely.sum() * (1 - slack)
    at_least = surely[:token].sum() <= number * most + slack * most
    at_most = perhaps[: token + 1].sum() >= number * least - slack * most
    return bool(at_least) and bool(at_most)
