"""Attention of consecutive positions of one sequence over pages, in fp32: what both ops do on a
CPU."""

from __future__ import annotations

import torch

MAX_GROUP = 16


def check_shapes(
    q: torch.Tensor, pages: torch.Tensor, num_kv_heads: int, out: torch.Tensor
) -> None:
    """Raises: ValueError with what does not fit a kernel."""
    rows, heads, dim = q.shape
    if heads % num_kv_heads or heads // num_kv_heads > MAX_GROUP:
        raise ValueError(f"{heads} heads over {num_kv_heads} KV heads: a group has 1 … {MAX_GROUP}")
    if pages.dim() != 6 or pages.shape[2] != 2 or pages.shape[4:] != (num_kv_heads, dim):
        wanted = f"[pages, layers, 2, positions, {num_kv_heads}, {dim}]"
        raise ValueError(f"pages are {tuple(pages.shape)}, not {wanted}")
    page_size = pages.shape[3]
    if page_size < 16 or page_size & (page_size - 1):
        raise ValueError(f"a page has {page_size} positions, not a power of two ≥ 16")
    if out.shape != (rows, heads * dim):
        raise ValueError(f"out is {tuple(out.shape)}, not [{rows}, {heads * dim}]")
    for name, tensor in (("q", q), ("pages", pages), ("out", out)):
        if not tensor.is_contiguous() or tensor.dtype != q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, strides {tensor.stride()}, not contiguous")


def attend(
    q: torch.Tensor, pages: torch.Tensor, table: torch.Tensor, start: int, layer: int, window: int
) -> torch.Tensor:
    """Row i is position start + i of the sequence and sees positions up to its own.

    Args:
        q: [n, H, D], n ≥ 1.
        pages: [num_pages, L, 2, P, Hk, D].
        table: [max_pages] int32, the sequence's pages.
        window: positions that a row sees, its own included; 0 = all.

    Returns: [n, H·D] in q's dtype.
    """
    num_rows, heads, dim = q.shape
    end, page_size = start + num_rows, pages.shape[3]
    first = max(0, start - window + 1) if window else 0
    seen = torch.arange(first, end, device=q.device)
    page = table.long()[seen // page_size]
    k, v = (
        pages[page, layer, plane, seen % page_size]
        .float()
        .repeat_interleave(heads // pages.shape[4], 1)
        for plane in (0, 1)
    )
    scores = torch.einsum("nhd,shd->hns", q.float(), k) / dim**0.5
    own = torch.arange(start, end, device=q.device)[:, None]
    hidden = seen > own
    if window:
        hidden |= seen <= own - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    out = torch.einsum("hns,shd->nhd", weights, v)
    return out.reshape(num_rows, heads * dim).to(q.dtype)
