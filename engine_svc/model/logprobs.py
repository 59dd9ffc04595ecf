"""Log probabilities of the model itself: before penalties, bias and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_svc.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """On the device: chosen [n], top_ids and top_values [n, k]."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    def rows(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """As Python values; row i reports its counts[i] most likely tokens."""
        chosen, ids, values = (t.tolist() for t in (self.chosen, self.top_ids, self.top_values))
        return [
            TokenLogprobs(
                token, chosen[i], tuple(zip(ids[i][:count], values[i][:count], strict=True))
            )
            for i, (token, count) in enumerate(zip(token_ids, counts, strict=True))
        ]


def rank_tokens(logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> RankedTokens:
    """Args: logits [n, V] fp32, token_ids [n] int64 in 0 … V − 1, top ≥ 0."""
    logprobs = torch.log_softmax(logits, dim=1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    best = logprobs.topk(min(top, logits.shape[1]), dim=1)
    return RankedTokens(chosen, best.indices, best.values)
