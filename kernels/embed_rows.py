"""The first hidden states of a step: embeddings of the tokens, those still on the device included.
Plain-torch reference and dispatch by device."""

from __future__ import annotations

import torch


def embed_rows(
    token_ids: torch.Tensor,
    row_seat: torch.Tensor,
    last_token: torch.Tensor,
    embedding: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor,
) -> None:
    """Look up each row's token and clear the residual stream that it will be added to.

    Semantics:
        id[t] = token_ids[t] if token_ids[t] ≥ 0 else last_token[row_seat[t]]
        out[t] = embedding[id[t]], 0 where row_seat[t] is −1; residual[t] = 0

    Args:
        token_ids: [T] int32; −1 = the seat's last sampled token.
        row_seat: [T] int32; −1 = padding.
        last_token: [seats] int32 or int64.
        embedding: [V, C] in any float dtype; cast to out's.
        out, residual: [T, C] compute dtype, rows contiguous; written.
    """
    if out.device.type == "cuda":
        # Triton is not installed where there is no GPU to use it
        from kernels.embed_rows_triton import embed_rows_triton

        embed_rows_triton(token_ids, row_seat, last_token, embedding, out, residual)
        return
    ids = resolved_ids(token_ids, row_seat, last_token)
    rows = embedding.index_select(0, ids).to(out.dtype)
    out.copy_(rows.masked_fill_((row_seat < 0).unsqueeze(1), 0))
    residual.zero_()


def resolved_ids(
    token_ids: torch.Tensor, row_seat: torch.Tensor, last_token: torch.Tensor
) -> torch.Tensor:
    """[T] int64: each row's token; 0 for padding."""
    late = last_token.index_select(0, row_seat.clamp(min=0)).long()
    return torch.where(token_ids < 0, late, token_ids.long()).masked_fill_(row_seat < 0, 0)
