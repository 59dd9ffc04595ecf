"""Add: a stored delta added to a site's output where no fused consumer does it. Plain-torch
reference."""

from __future__ import annotations

import torch

from kernels.lora_tables import LoraDelta


def lora_add(y: torch.Tensor, delta: LoraDelta) -> torch.Tensor:
    """Epilogue of one site: y ← g ⊙ y + delta in fp32, rounded once (see LoraDelta).

    Semantics:
        y[t, n] = g[s, cell][n] · y[t, n] + delta[t, n], for s = row_slot[t] ≥ 0

    Args:
        y: [T, N] compute dtype, rows contiguous; changed in place. Rows without an adapter do not
            change.
        delta: what lora_delta stored for the same rows.

    Returns: y.
    """
    table, cell = delta.table, delta.cell
    for slot in sorted(set(delta.row_slot.tolist())):
        if slot < 0:
            continue
        rows = (delta.row_slot == slot).nonzero().squeeze(1)
        total = y[rows].float()
        gain = int(table.g_off[slot, cell])
        if gain >= 0:
            total *= table.block(gain, 1, y.shape[1], torch.float32)
        if table.live[slot, cell]:
            total += delta.delta[rows].float()
        y[rows] = total.to(y.dtype)
    return y
