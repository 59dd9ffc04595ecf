"""The gated activation with the LoRA delta of its input. Plain-torch reference, and the choice of
the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.add_delta import add_delta
from kernels.lora_tables import LoraDelta


def silu_mul_delta(
    gate_up: torch.Tensor, out: torch.Tensor, delta: LoraDelta | None = None
) -> torch.Tensor:
    """Semantics: y = g ⊙ gate_up + delta (kernels.add_delta); out[t, i] = silu(y[t, i]) ·
    y[t, I + i], in fp32, rounded once.

    Args:
        gate_up: [T, 2·I] compute dtype, gate first, rows contiguous.
        out: [T, I] compute dtype, rows contiguous; written in place.
        delta: of the gate_up projection; rows behind T do not count.

    Returns: out.
    """
    if gate_up.is_cuda:
        from kernels.silu_mul_delta_triton import silu_mul_delta_triton

        return silu_mul_delta_triton(gate_up, out, delta)
    y, width = add_delta(gate_up, delta), out.shape[1]
    return out.copy_(F.silu(y[:, :width]) * y[:, width:])
