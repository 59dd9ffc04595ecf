"""Log probabilities of chosen tokens and of the most likely ones. Plain-torch reference, and the
choice of the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: most tokens that a row reports beside the chosen one
MAX_TOP = 20
#: columns that one program of the first launch reads, and numbers it leaves for each: a power of
#: two ≥ MAX_TOP
BLOCK, KEPT = 2048, 32


@dataclass(frozen=True, slots=True)
class RankScratch:
    """Of NB blocks of BLOCK columns: maxima, sums [R, NB] fp32; values, columns [R, NB, KEPT] fp32
    and int32."""

    maxima: torch.Tensor
    sums: torch.Tensor
    values: torch.Tensor
    columns: torch.Tensor


def rank_scratch(num_rows: int, vocab_size: int, device: torch.device) -> RankScratch:
    blocks = -(-vocab_size // BLOCK)
    shape, wide = (num_rows, blocks), (num_rows, blocks, KEPT)
    return RankScratch(
        torch.zeros(shape, device=device),
        torch.zeros(shape, device=device),
        torch.zeros(wide, device=device),
        torch.zeros(wide, dtype=torch.int32, device=device),
    )


def rank_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    top: int,
    scratch: RankScratch,
    chosen: torch.Tensor,
    top_ids: torch.Tensor,
    top_values: torch.Tensor,
) -> None:
    """Semantics, for each i < R with t = rows[i], L = log softmax(logits[t]) in fp32:
        chosen[i] = L[max(tokens[t], 0)]; top_ids[i, :top] the tokens of the largest L, largest
        first, of equals the first token first; top_values[i, :top] their L

    Args:
        logits: [N, V] compute dtype or fp32, last dimension contiguous.
        rows: [R] int32, rows of logits.
        tokens: [≥ N] int32; −1 counts as 0.
        top: 0 … MAX_TOP, at most V.
        scratch: of at least R rows; of use on a GPU only.
        chosen: [≥ R] fp32; top_ids [≥ R, ≥ top] int32 and top_values [≥ R, ≥ top] fp32,
            contiguous; written in place.
    """
    if logits.is_cuda:
        from kernels.rank_tokens_triton import rank_tokens_triton

        rank_tokens_triton(logits, rows, tokens, top, scratch, chosen, top_ids, top_values)
        return
    for index, row in enumerate(rows.tolist()):
        logprobs = torch.log_softmax(logits[row].float(), dim=0)
        chosen[index] = logprobs[max(int(tokens[row]), 0)]
        best = logprobs.sort(descending=True, stable=True)
        top_ids[index, :top] = best.indices[:top].int()
        top_values[index, :top] = best.values[:top]
