"""Attention over the arena's pages: one row a sequence (decode) or many (prefill). Plain-torch
reference.

Pages are [page, layer, k|v, position, kv_head, head_dim]. Seen flat, a (page, layer, k|v) is one
row of `position · kv_head · head_dim` numbers; a plan holds the rows to gather, for every layer,
built once a step.

Index letters: T rows of the step, B decode rows, M pages of the longest of them, P positions a
page, L layers, H heads, Hk KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Sequences that compute one position each.

    Args:
        rows: [B] int64, their rows in the step; None: rows 0 … T − 1.
        gather: [L, 2, B·M] int64, flat rows of K and of V; a shorter sequence repeats its first
            page.
        mask: [B, 1, 1, M·P], 0 where a position is seen, −inf elsewhere.
    """

    rows: torch.Tensor | None
    gather: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A run of rows of one sequence.

    Args:
        first_row, num_rows: its rows in the step.
        gather: [L, 2, M] int64, flat rows of K and of V.
        mask: [1, 1, num_rows, M·P], 0 where a position is seen, −inf elsewhere.
    """

    first_row: int
    num_rows: int
    gather: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where a step writes and reads keys and values.

    Args:
        write: [L, 2, T] int64; position rows of K and of V of the step's T rows, counted in
            [kv_head · head_dim] units of the arena.
    """

    write: torch.Tensor
    decode: DecodeBatch | None
    prefills: tuple[PrefillChunk, ...]


def write_kv(
    pages: torch.Tensor, plan: AttentionPlan, layer: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Store the step's keys and values [T, Hk, D] in `pages` [.., Hk·D] at plan.write[layer]."""
    width = k.shape[1] * k.shape[2]
    pages = pages.view(-1, width)
    pages.index_copy_(0, plan.write[layer, 0], k.reshape(-1, width))
    pages.index_copy_(0, plan.write[layer, 1], v.reshape(-1, width))


def paged_attention(
    q: torch.Tensor, pages: torch.Tensor, plan: AttentionPlan, layer: int, num_kv_heads: int
) -> torch.Tensor:
    """Causal attention of the step's rows to their sequences' positions, scaled by 1/√D.

    Semantics:
        out[t, h] = Σ_s softmax_s(q[t, h] · K[s, h // (H/Hk)] / √D + mask[t, s]) · V[s, h // (H/Hk)]

    Args:
        q: [T, H, D] compute dtype, contiguous.
        pages: the arena as numbers of the compute dtype, one dimension. Masked positions of a
            gathered page must be finite.
        plan: this step's; keys and values of its own rows are written already.
        layer: index into plan.
        num_kv_heads: Hk, a divisor of H.

    Returns: [T, H·D].
    """
    num_rows, heads, dim = q.shape
    if plan.decode is not None and plan.decode.rows is None:
        return _decode(q, pages, plan.decode, layer, num_kv_heads)
    out = torch.empty((num_rows, heads * dim), dtype=q.dtype, device=q.device)
    if plan.decode is not None and plan.decode.rows is not None:
        rows = plan.decode.rows
        part = _decode(q.index_select(0, rows), pages, plan.decode, layer, num_kv_heads)
        out.index_copy_(0, rows, part)
    for chunk in plan.prefills:
        rows_of = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        k, v = _gather(pages, chunk.gather[layer], 1, chunk.mask.shape[3], num_kv_heads, dim)
        part = F.scaled_dot_product_attention(
            q[rows_of].transpose(0, 1).unsqueeze(0), k, v, attn_mask=chunk.mask, enable_gqa=True
        )
        out[rows_of] = part[0].transpose(0, 1).reshape(chunk.num_rows, heads * dim)
    return out


def _decode(
    q: torch.Tensor, pages: torch.Tensor, batch: DecodeBatch, layer: int, num_kv_heads: int
) -> torch.Tensor:
    num_rows, heads, dim = q.shape
    k, v = _gather(pages, batch.gather[layer], num_rows, batch.mask.shape[3], num_kv_heads, dim)
    # the heads of a group stand where query positions usually do: no repeated keys
    grouped = q.view(num_rows, num_kv_heads, heads // num_kv_heads, dim)
    part = F.scaled_dot_product_attention(grouped, k, v, attn_mask=batch.mask)
    return part.reshape(num_rows, heads * dim)


def _gather(
    pages: torch.Tensor, rows: torch.Tensor, batch: int, positions: int, kv_heads: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a batch, each [batch, Hk, positions, D]."""
    page_size = positions * batch // rows.shape[1]
    flat = pages.view(-1, page_size * kv_heads * dim)
    shape = (batch, positions, kv_heads, dim)
    k = flat.index_select(0, rows[0]).view(shape).transpose(1, 2)
    v = flat.index_select(0, rows[1]).view(shape).transpose(1, 2)
    return k, v
