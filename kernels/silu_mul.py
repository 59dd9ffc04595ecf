"""The gated activation of a Llama-like feed-forward block. Plain-torch reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Semantics: out[t, i] = silu(gate_up[t, i]) · gate_up[t, I + i].

    Args: gate_up [T, 2·I], gate first. Returns: [T, I], contiguous.
    """
    width = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :width]).mul_(gate_up[:, width:])
