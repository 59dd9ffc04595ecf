"""torch's own attention on contiguous keys and values: what paging may cost at most.

Sequences of equal length only. No page table is read, so these are floors for programs that serve.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from benchmarks.attention.cases import Batch

#: contiguous copies of so many layers, to read more than caches hold
COPIED_BYTES = 4 << 30


def peers(batch: Batch) -> dict[str, Callable[[], None]]:
    """Name → a run over `copied_layers(batch)` layers; those that do not run here are left out."""
    if len(set(batch.case.chunks)) != 1 or not batch.q.is_cuda:
        return {}
    start, new = batch.case.chunks[0]
    if new > 1 and start > 0:
        # torch's causal mask is not that of a chunk after a prefix
        return {}
    layers = [_contiguous(batch, layer) for layer in range(copied_layers(batch))]
    candidates = {"sdpa": _sdpa(batch, layers)}
    if new > 1:
        candidates["varlen"] = _varlen(batch, layers)
    return {name: run for name, run in candidates.items() if _runs(name, run)}


def copied_layers(batch: Batch) -> int:
    fitting = COPIED_BYTES // batch.case.kv_bytes(batch.shape)
    return max(1, min(batch.shape.layers, fitting))


def _contiguous(batch: Batch, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [B, S, Hk, D]."""
    start, new = batch.case.chunks[0]
    rows = []
    for _, _, seat, _ in batch.runs:
        # [pages, 2, P, Hk, D] → [2, S, Hk, D]
        own = batch.pages[batch.page_table[seat].long(), layer].transpose(0, 1).flatten(1, 2)
        rows.append(own[:, : start + new])
    k, v = torch.stack(rows, 1)
    return k, v


def _sdpa(batch: Batch, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    _, new = batch.case.chunks[0]
    q = batch.q.view(len(batch.runs), new, *batch.q.shape[1:]).transpose(1, 2)
    views = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in layers]

    def run() -> None:
        for k, v in views:
            F.scaled_dot_product_attention(q, k, v, is_causal=new > 1, enable_gqa=True)

    return run


def _varlen(batch: Batch, layers: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    _, new = batch.case.chunks[0]
    group = batch.shape.heads // batch.shape.kv_heads
    ends = torch.arange(0, batch.q.shape[0] + 1, new, dtype=torch.int32, device=batch.q.device)
    # heads repeated beforehand: not every release takes fewer KV heads
    views = [tuple(x.repeat_interleave(group, 2).flatten(0, 1) for x in pair) for pair in layers]

    # releases say it in two ways
    names = inspect.signature(varlen_attn).parameters
    causal = {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}

    def run() -> None:
        for k, v in views:
            varlen_attn(batch.q, k, v, ends, ends, new, new, **causal)

    return run


def _runs(name: str, run: Callable[[], None]) -> bool:
    try:
        run()
        torch.cuda.synchronize()
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"{name} does not run here: {str(error).splitlines()[0][:120]}")
        return False
    return True
