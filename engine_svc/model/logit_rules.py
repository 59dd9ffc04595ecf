"""What changes logits before a token is chosen: penalties, bias, min_tokens, grammar masks.

Every rule changes a row by that row's own parameters alone, and only rows that ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from engine_svc.model.seats import SeatParams, SeatState


def apply_rules(
    logits: torch.Tensor,
    seats: Sequence[int],
    positions: Sequence[int],
    state: SeatState,
    token_masks: Mapping[int, bytes],
) -> torch.Tensor:
    """Adjusted logits [n, V] fp32; the argument is not changed, and is returned when no rule
    applies.

    Args:
        seats, positions: of each row; a position counts the tokens before the one to sample.
        token_masks: grammar masks by seat, bit i allows token i.
    """
    params = [state.params(seat) for seat in seats]
    penalised = [row for row, p in enumerate(params) if p.counts_tokens]
    biases = _biases(params, logits.shape[1])
    banned = _banned(params, positions, logits.shape[1])
    masked = [(row, token_masks[seat]) for row, seat in enumerate(seats) if seat in token_masks]
    if not (penalised or biases or banned or masked):
        return logits
    logits = logits.clone()
    if penalised:
        _penalise(logits, penalised, seats, params, state)
    if biases:
        rows, tokens, values = zip(*biases, strict=True)
        at = _index(rows, logits), _index(tokens, logits)
        added = torch.tensor(values, dtype=logits.dtype, device=logits.device)
        logits.index_put_(at, added, accumulate=True)
    if banned:
        rows, tokens = zip(*banned, strict=True)
        never = torch.tensor(-torch.inf, dtype=logits.dtype, device=logits.device)
        logits.index_put_((_index(rows, logits), _index(tokens, logits)), never)
    for row, mask in masked:
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        allowed = torch.zeros(logits.shape[1], dtype=torch.bool)
        allowed[: len(bits)] = torch.from_numpy(bits[: logits.shape[1]].astype(bool))
        logits[row].masked_fill_(~allowed.to(logits.device), -torch.inf)
    return logits


def _penalise(
    logits: torch.Tensor,
    rows: Sequence[int],
    seats: Sequence[int],
    params: Sequence[SeatParams],
    state: SeatState,
) -> None:
    """Repetition over prompt and output, presence and frequency over output."""
    at, seat_at = _index(rows, logits), _index([seats[row] for row in rows], logits)
    sampling = [params[row].sampling for row in rows]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device).unsqueeze(1)

    part = logits.index_select(0, at)
    counts = state.output_counts.index_select(0, seat_at)
    if any(s.repetition_penalty != 1.0 for s in sampling):
        seen = state.prompt_mask.index_select(0, seat_at).logical_or_(counts > 0)
        repetition = column([s.repetition_penalty for s in sampling])
        part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        # a penalty near 0 overflows; two infinities would have no difference
        part.clamp_(max=torch.finfo(part.dtype).max)
    if any(s.frequency_penalty != 0.0 for s in sampling):
        part.sub_(counts * column([s.frequency_penalty for s in sampling]))
    if any(s.presence_penalty != 0.0 for s in sampling):
        part.sub_((counts > 0) * column([s.presence_penalty for s in sampling]))
    logits.index_copy_(0, at, part)


def _biases(params: Sequence[SeatParams], vocab_size: int) -> list[tuple[int, int, float]]:
    return [
        (row, token, value)
        for row, p in enumerate(params)
        for token, value in p.sampling.logit_bias
        if token < vocab_size
    ]


def _banned(
    params: Sequence[SeatParams], positions: Sequence[int], vocab_size: int
) -> list[tuple[int, int]]:
    """(row, token) of stopping tokens in rows that have fewer than min_tokens outputs."""
    return [
        (row, token)
        for row, (p, position) in enumerate(zip(params, positions, strict=True))
        if position - p.prompt_tokens < p.sampling.min_tokens
        for token in p.sampling.eos_token_ids + p.sampling.stop_token_ids
        if token < vocab_size
    ]


def _index(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)
