"""What every consumer of a LoRA site does first: y ← g ⊙ y + delta. Plain-torch reference."""

from __future__ import annotations

import torch

from kernels.lora_tables import LoraDelta


def add_delta(y: torch.Tensor, delta: LoraDelta | None) -> torch.Tensor:
    """Semantics, with s = row_slot[t] ≥ 0: out[t, n] = g[s, cell][n] · y[t, n] + delta[t, n]; other
    rows as they are. See LoraDelta for what counts as one and as zero.

    Args: y [T, N]. Returns: [T, N] fp32, a new tensor.
    """
    out = y.to(torch.float32, copy=True)
    if delta is None:
        return out
    table, cell = delta.table, delta.cell
    for slot in set(delta.row_slot.tolist()) - {-1}:
        rows = (delta.row_slot[: len(out)] == slot).nonzero().squeeze(1)
        gain = int(table.g_off[slot, cell])
        part = out[rows]
        if gain >= 0:
            part = part * table.block(gain, 1, y.shape[1], torch.float32)
        if bool(table.live[slot, cell]):
            part = part + delta.delta[rows].float()
        out[rows] = part
    return out
