"""From logits to tokens: greedy, or drawn from what temperature, top_k, top_p and min_p leave.

A row's token is a function of its logits, its own parameters and (seed, choice, position): a row is
drawn by inverting the cumulative probabilities in vocabulary order at one uniform number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from engine_svc.model.logit_rules import apply_rules
from engine_svc.model.randomness import uniform
from engine_svc.model.seats import SeatParams, SeatState

#: How many of the most likely tokens are ordered before the whole vocabulary is (CPU only).
#: Measured on one AVX-512 core, 8 rows of 49,152: topk of 64 0.6 ms, of 1,024 8 ms, sort 77 ms.
_HEADS = (64, 1024)
#: Tokens a block of the two-level search. Same machine: a cumsum of the whole rows takes 11 ms.
_BLOCK = 256


class Sampler:
    """Draws one token a row and remembers it in the seats' state."""

    def __init__(self, state: SeatState) -> None:
        self._state = state

    def sample(
        self,
        logits: torch.Tensor,
        seats: Sequence[int],
        positions: Sequence[int],
        token_masks: Mapping[int, bytes],
    ) -> torch.Tensor:
        """Tokens [n] int64 of logits [n, V] fp32; −1 where a row is not finite or
        its rules allow no token.

        Args: seats, positions, token_masks as in apply_rules.
        """
        # a sum of finite fp32 logits is finite; inf and nan survive it
        finite = torch.isfinite(logits.sum(dim=1))
        params = [self._state.params(seat) for seat in seats]
        adjusted = apply_rules(logits, seats, positions, self._state, token_masks)
        if adjusted is not logits:
            # rules may leave no token at all
            finite &= adjusted.amax(dim=1) > -torch.inf
        tokens = torch.argmax(adjusted, dim=1)
        drawn = [row for row, p in enumerate(params) if p.sampling.temperature > 0]
        if drawn:
            at = torch.tensor(drawn, device=logits.device)
            picked = [params[row] for row in drawn]
            numbers = [
                uniform(params[row].sampling.seed, params[row].choice, positions[row])
                for row in drawn
            ]
            part = adjusted if len(drawn) == len(seats) else adjusted.index_select(0, at)
            tokens.index_copy_(0, at, _draw(part, picked, numbers))
        self._state.commit(seats, torch.where(finite, tokens, 0))
        return torch.where(finite, tokens, -1)


def _draw(
    logits: torch.Tensor, params: Sequence[SeatParams], numbers: Sequence[float]
) -> torch.Tensor:
    """Tokens [n] of logits [n, V] at uniform numbers [n] in [0, 1)."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(1)

    temperature = column([p.sampling.temperature for p in params])
    shifted = logits - logits.amax(dim=1, keepdim=True)
    probabilities = torch.softmax(shifted / temperature, dim=1)
    kept = keep_likely(probabilities, params)
    return _invert(kept, column(numbers, torch.float64))


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """First token [n] whose cumulative weight exceeds number · total; weights [n, V] ≥ 0, numbers
    [n, 1] in [0, 1). Finds the block of tokens first, then the token in it."""
    padded = F.pad(weights, (0, -weights.shape[1] % _BLOCK))
    blocks = padded.view(weights.shape[0], -1, _BLOCK)
    outer = blocks.sum(dim=2).cumsum(dim=1, dtype=torch.float64)
    target = _below(numbers * outer[:, -1:], outer[:, -1:])
    block = torch.searchsorted(outer, target, right=True).clamp_(max=outer.shape[1] - 1)
    before = torch.where(block > 0, outer.gather(1, (block - 1).clamp(min=0)), 0.0)
    rows = torch.arange(weights.shape[0], device=weights.device)
    inner = blocks[rows, block.squeeze(1)].cumsum(dim=1, dtype=torch.float64)
    place = torch.searchsorted(inner, _below(target - before, inner[:, -1:]), right=True)
    found = (block * _BLOCK + place).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)


def _below(values: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Rounding must not reach the end, where tokens of weight 0 may stand."""
    return torch.minimum(values, torch.nextafter(limit, torch.zeros_like(limit)))


def keep_likely(probabilities: torch.Tensor, params: Sequence[SeatParams]) -> torch.Tensor:
    """Probabilities [n, V], 0 where top_k, then top_p, then min_p remove a token.

    All three keep the tokens at or above a threshold of the row, so ties are kept together: top_k
    the k-th largest; top_p the last of the fewest whose mass reaches p; min_p the fraction of the
    largest.
    """
    sampling = [p.sampling for p in params]
    cut = [row for row, s in enumerate(sampling) if s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0]
    if not cut:
        return probabilities
    at = torch.tensor(cut, device=probabilities.device)
    part = probabilities.index_select(0, at)
    vocab = part.shape[1]

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=part.dtype, device=part.device).unsqueeze(1)

    limits = [sampling[row].top_k or vocab for row in cut]
    threshold = _top_threshold(
        part, [min(k, vocab) for k in limits], column([sampling[row].top_p for row in cut])
    )
    least = column([sampling[row].min_p for row in cut]) * part.amax(dim=1, keepdim=True)
    kept = part * (part >= torch.maximum(threshold, least))
    return probabilities.index_copy(0, at, kept)


def _top_threshold(part: torch.Tensor, top_k: Sequence[int], top_p: torch.Tensor) -> torch.Tensor:
    """[n, 1] the smallest probability that top_k and then top_p keep."""
    vocab, on_cpu = part.shape[1], part.device.type == "cpu"
    limits = torch.tensor(top_k, device=part.device).unsqueeze(1)
    total = part.sum(dim=1, keepdim=True).double()
    threshold = torch.zeros_like(top_p)
    rows = torch.arange(len(top_k), device=part.device)
    for width in (*(w for w in _HEADS if on_cpu and w < vocab), vocab):
        ordered = part[rows].topk(width, dim=1).values
        found, settled = _threshold_of(ordered, limits[rows], top_p[rows], total[rows], vocab)
        threshold[rows] = found
        # the whole vocabulary settles every row; asking would wait for a GPU
        if width == vocab or bool(settled.all()):
            break
        rows = rows[~settled.squeeze(1)]
    return threshold


def _threshold_of(
    ordered: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    total: torch.Tensor,
    vocab: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Threshold [n, 1] from the most likely probabilities [n, m], and whether m were enough."""
    width = ordered.shape[1]
    rank = torch.arange(width, device=ordered.device)
    ordered = ordered.masked_fill(rank >= top_k, 0.0)
    cumulative = ordered.cumsum(dim=1, dtype=torch.float64)
    mass = torch.where(top_k >= vocab, total, cumulative[:, -1:])
    before = cumulative - ordered
    # the first token is always kept
    keep = ((before < top_p * mass) | (rank == 0)) & (rank < top_k)
    last = keep.sum(dim=1, keepdim=True) - 1
    threshold = ordered.gather(1, last)
    settled = (top_k <= width) | ((top_k >= vocab) & (last < width - 1))
    # nothing to cut by top_p and top_k: keep all
    whole = (top_p >= 1.0) & (top_k >= vocab)
    return torch.where(whole, 0.0, threshold), settled | whole
