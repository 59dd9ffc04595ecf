"""From logits to one token a row, with everything a row asks for in two launches. Plain-torch
reference, and the choice of the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import sample_tables as tables
from kernels.sample_tables import SampleRows, SeatTable

#: columns that one program of the first launch reads
BLOCK = 2048
#: the most likely tokens of a block that it hands to the second launch
CANDIDATES = 32


@dataclass(frozen=True, slots=True)
class SampleScratch:
    """What the first launch hands to the second; NB blocks of BLOCK columns. Sized for N rows.

    Args:
        maxima, sums, rests: [N, NB] fp32; the largest logit, Σ exp((x − largest) / temperature),
            and the largest logit that is not among the candidates.
        places, counts, faults: [N, NB] int32; column of the largest logit, number of candidates,
            number of logits that are not finite.
        values, columns: [N, NB, CANDIDATES] fp32 and int32; logits in the order of the vocabulary.
    """

    maxima: torch.Tensor
    sums: torch.Tensor
    rests: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    faults: torch.Tensor
    values: torch.Tensor
    columns: torch.Tensor


def sample_scratch(num_rows: int, vocab_size: int, device: torch.device) -> SampleScratch:
    blocks = -(-vocab_size // BLOCK)
    shape, wide = (num_rows, blocks), (num_rows, blocks, CANDIDATES)
    shapes = (shape, shape, shape, wide)
    maxima, sums, rests, values = (torch.zeros(s, device=device) for s in shapes)
    places, counts, faults, columns = (
        torch.zeros(s, dtype=torch.int32, device=device) for s in shapes
    )
    return SampleScratch(maxima, sums, rests, places, counts, faults, values, columns)


def sample(
    logits: torch.Tensor,
    rows: SampleRows,
    table: SeatTable,
    scratch: SampleScratch,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """One token a row, drawn or the most likely; the seats remember it.

    Semantics, for each row i with s = seats[i] ≥ 0, x = logits[i] in fp32:
        x is not finite somewhere: −1
        x[v] ← min(x[v] / r or · r, largest float) for tokens seen, by the sign of x[v]; − count ·
        frequency − (count > 0) · presence; + bias[s, v]; −∞ where the token may not come or a mask
        forbids it. Nothing left: −1
        w[v] = exp((x[v] − max x) / temperature); the tokens at or above a threshold are kept: the
        larger of the TOP_K-th largest w, the last w of the fewest whose sum reaches TOP_P of the
        TOP_K largest, MIN_P
        the token is the largest x, the first of equals, or the first v with Σ_{u ≤ v} w[u] >
        numbers[i] · Σ w over kept tokens
        tokens[i] ← token; last_token[s] ← token or 0; tally[s, token] += ONE_OUTPUT if PENALISED

    Args:
        logits: [N, V] compute dtype or fp32, last dimension contiguous.
        rows, table: see kernels.sample_tables; the seats of a step differ.
        scratch: of at least N rows; of use on a GPU only.
        tokens: [≥ N] int32, written in place; padding rows keep what they have.

    Returns: tokens.
    """
    if logits.is_cuda:
        from kernels.sample_triton import sample_triton

        return sample_triton(logits, rows, table, scratch, tokens)
    for row in range(logits.shape[0]):
        seat = int(rows.seats[row])
        if seat >= 0:
            token = _token_of(logits[row].float(), row, seat, rows, table)
            tokens[row] = token
            table.last_token[seat] = max(token, 0)
            if token >= 0 and int(table.words[seat, tables.FLAGS]) & tables.PENALISED:
                table.tally[seat, token] += tables.ONE_OUTPUT
    return tokens


def _token_of(x: torch.Tensor, row: int, seat: int, rows: SampleRows, table: SeatTable) -> int:
    if not bool(torch.isfinite(x).all()):
        return -1
    flags = int(table.words[seat, tables.FLAGS])
    x = _adjusted(x, row, seat, flags, rows, table)
    best = int(torch.argmax(x))
    if bool(x[best] == -torch.inf):
        return -1
    if not flags & tables.DRAWN:
        return best
    weights = torch.exp((x - x[best]) * table.floats[seat, tables.INVERSE_TEMPERATURE])
    if flags & tables.CUT:
        top_p, min_p = (float(table.floats[seat, at]) for at in (tables.TOP_P, tables.MIN_P))
        weights *= weights >= _threshold(
            weights, int(table.words[seat, tables.TOP_K]), top_p, min_p
        )
    cumulative = weights.double().cumsum(0)
    above = (cumulative > rows.numbers[row] * cumulative[-1]) & (weights > 0)
    # rounding may leave none
    return int(torch.argmax(above.int())) if bool(above.any()) else int(weights.nonzero()[-1])


def _adjusted(
    x: torch.Tensor, row: int, seat: int, flags: int, rows: SampleRows, table: SeatTable
) -> torch.Tensor:
    words, floats, tally = table.words[seat], table.floats[seat], table.tally[seat]
    if flags & tables.PENALISED:
        count = tally // tables.ONE_OUTPUT
        seen = ((tally & tables.IN_PROMPT) > 0) | (count > 0)
        repetition = floats[tables.REPETITION]
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x.clamp(max=torch.finfo(torch.float32).max)
        x = x - count * floats[tables.FREQUENCY] - (count > 0) * floats[tables.PRESENCE]
    if flags & tables.BIASED:
        x = x + table.bias[seat]
    if flags & tables.BANNED and int(rows.positions[row]) < int(words[tables.BANNED_UNTIL]):
        x = x.masked_fill((tally & tables.MAY_NOT_COME) > 0, -torch.inf)
    if rows.token_masks is not None and rows.mask_of_row is not None:
        mask = int(rows.mask_of_row[row])
        if mask >= 0:
            bits = torch.arange(32, dtype=torch.int32)
            allowed = (rows.token_masks[mask].unsqueeze(1) >> bits) & 1
            x = x.masked_fill(allowed.view(-1)[: x.shape[0]] == 0, -torch.inf)
    return x


def _threshold(weights: torch.Tensor, top_k: int, top_p: float, min_p: float) -> float:
    ordered = weights.sort(descending=True).values[:top_k]
    threshold = float(ordered[-1]) if top_k < weights.shape[0] else 0.0
    if top_p < 1.0:
        before = ordered.double().cumsum(0) - ordered
        keep = before < top_p * float(ordered.double().sum())
        # the first token is always kept
        threshold = float(ordered[max(int(keep.sum()) - 1, 0)])
    return max(threshold, min_p)
