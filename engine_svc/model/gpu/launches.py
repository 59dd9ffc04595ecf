"""Which kernels of the trunk may begin before the launch ahead of them has ended.

Programmatic dependent launch: such a kernel waits by itself until the launch ahead of it has ended,
just before it reads what that one writes. It may begin while launches further ahead still run, so
before that wait it reads only what is older than the trunk's first norm: inputs of the step, page
table, weights, tables of adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.add_rms_norm import add_rms_norm
from kernels.decode_attention import decode_attention
from kernels.lora_launch import overlaps
from kernels.rope_store import rope_store
from kernels.silu_mul_delta import silu_mul_delta

Launch = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Launches:
    """The functions of kernels/ under their names."""

    add_rms_norm: Launch
    decode_attention: Launch
    rope_store: Launch
    silu_mul_delta: Launch


def trunk_launches(like: torch.Tensor, *, overlap: bool) -> Launches:
    """Args: like, any tensor on the device; overlap, take dependent launches where it has
    them."""
    if not (overlap and overlaps(like)):
        return Launches(add_rms_norm, decode_attention, rope_store, silu_mul_delta)
    # Triton is not installed where there is no GPU to use it
    from kernels.add_rms_norm_triton import add_rms_norm_triton
    from kernels.decode_attention_triton import decode_attention_triton
    from kernels.rope_store_triton import rope_store_triton
    from kernels.silu_mul_delta_triton import silu_mul_delta_triton

    return Launches(
        partial(add_rms_norm_triton, pdl=True),
        partial(decode_attention_triton, pdl=True),
        partial(rope_store_triton, pdl=True),
        partial(silu_mul_delta_triton, pdl=True),
    )
