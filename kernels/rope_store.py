"""From the fused qkv projection to what attention reads: delta, norms, rotation, keys and values
into the pages. Plain-torch reference, and the choice of the device."""

from __future__ import annotations

import torch

from kernels.add_delta import add_delta
from kernels.lora_tables import LoraDelta
from kernels.rms_norm import rms_norm
from kernels.rope import rope


def rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    row_seat: torch.Tensor,
    page_table: torch.Tensor,
    pages: torch.Tensor,
    layer: int,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    use_rope: bool = True,
    delta: LoraDelta | None = None,
) -> torch.Tensor:
    """Semantics, for each row t with s = row_seat[t] ≥ 0, p = positions[t], heads as q, k, v:
        y = g ⊙ qkv[t] + delta[t] (kernels.add_delta); q and k heads are normed over D, if asked
        (kernels.rms_norm), then rotated by cos[p], sin[p], if asked (kernels.rope)
        q_out[t] = q; pages[page_table[s, p // P], layer, 0 | 1, p % P] = k | v
        all in fp32, rounded once. A row of seat −1 or page −1 writes nothing to the pages, and a
        row of seat −1 nothing at all.

    Args:
        qkv: [T, (H + 2·Hk)·D] compute dtype, rows contiguous; not changed.
        positions, row_seat: [≥ T] int32.
        page_table: [seats, max pages] int32.
        pages: [num pages, layers, 2, P, Hk, D] compute dtype, contiguous: the arena.
        layer: index into pages.
        cos, sin: [context, 1, R/2] float, contiguous; R ≤ D numbers of a head are rotated. Of use
            only with use_rope.
        q_out: [T, H, D] compute dtype, contiguous; written in place.
        q_norm, k_norm: [D] compute dtype; both or none.
        delta: of the qkv projection; rows behind T do not count.

    Returns: q_out.
    """
    if qkv.is_cuda:
        from kernels.rope_store_triton import rope_store_triton

        return rope_store_triton(
            qkv, positions, row_seat, page_table, pages, layer, cos, sin, q_out, q_norm, k_norm,
            eps, use_rope, delta,
        )  # fmt: skip
    (rows, heads, dim), kv_heads, page_size = q_out.shape, pages.shape[4], pages.shape[3]
    split = add_delta(qkv, delta).view(rows, heads + 2 * kv_heads, dim)
    q, k, v = split[:, :heads], split[:, heads:-kv_heads], split[:, -kv_heads:]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm.float(), eps), rms_norm(k, k_norm.float(), eps)
    at = positions[:rows].long()
    if use_rope:
        q, k = (rope(x, cos[at].float(), sin[at].float()) for x in (q, k))
    seats = row_seat[:rows].long()
    live = seats >= 0
    q_out[live] = q[live].to(q_out.dtype)
    page = torch.where(live, page_table[seats.clamp(min=0), at // page_size].long(), -1)
    live = page >= 0
    for index, values in enumerate((k, v)):
        pages[page[live], layer, index, at[live] % page_size] = values[live].to(pages.dtype)
    return q_out
