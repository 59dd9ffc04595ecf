"""kernels.add_delta for Triton: the start of every kernel that reads a LoRA site's output."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.lora_tables import OFFSET_UNIT, LoraDelta

#: up to so many rows a delta is read before it is known whether the row has one: the bytes are few,
#: and the slot is two dependent reads away
EAGER_ROWS = 512


@triton.jit
def row_delta(row, row_slot, live, g_off, cell, num_cells):  # type: ignore[no-untyped-def]
    """(whether the row has a delta, offset of its gain or −1)."""
    slot = tl.load(row_slot + row)
    at = tl.maximum(slot, 0).to(tl.int64) * num_cells + cell
    has_delta = (slot >= 0) & (tl.load(live + at) != 0)
    gain = tl.where(slot >= 0, tl.load(g_off + at), -1)
    return has_delta, gain


@triton.jit  # type: ignore[untyped-decorator]
def add_delta(  # type: ignore[no-untyped-def]
    y,
    delta_at,
    columns,
    inside,
    has_delta,
    gain,
    arena,
    EAGER: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
):
    """fp32 y of one row, with its gain and delta.

    Args: y and delta_at (pointers) of one shape; columns: of the site's output, same shape; inside:
        mask of that shape; has_delta, gain: scalars from row_delta.
    """
    if EAGER:
        delta = tl.load(delta_at, mask=inside, other=0.0).to(tl.float32)
        if gain >= 0:
            y = y * gain_at(arena, gain, columns, inside, OFFSET_UNIT)
        y = tl.where(has_delta, y + delta, y)
    else:
        if gain >= 0:
            y = y * gain_at(arena, gain, columns, inside, OFFSET_UNIT)
        if has_delta:
            y = y + tl.load(delta_at, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit  # type: ignore[untyped-decorator]
def gain_at(arena, gain, columns, inside, OFFSET_UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    g = (arena + tl.multiple_of(gain * OFFSET_UNIT, 16)).to(tl.pointer_type(tl.float32))
    return tl.load(g + columns, mask=inside, other=1.0)


def delta_arguments(delta: LoraDelta | None, unused: torch.Tensor) -> dict[str, Any]:
    """Arguments of a kernel that begins with row_delta and add_delta; `unused` stands for pointers
    that are not read."""
    if delta is None:
        return {
            "delta": unused, "row_slot": unused, "live": unused, "g_off": unused, "arena": unused,
            "cell": 0, "num_cells": 0, "delta_stride": 0,
            "HAS_DELTA": False, "EAGER": False, "OFFSET_UNIT": OFFSET_UNIT,
        }  # fmt: skip
    table = delta.table
    return {
        "delta": delta.delta, "row_slot": delta.row_slot, "live": table.live, "g_off": table.g_off,
        "arena": table.arena, "cell": delta.cell, "num_cells": table.live.shape[1],
        "delta_stride": delta.delta.stride(0),
        "HAS_DELTA": True, "EAGER": delta.row_slot.shape[0] <= EAGER_ROWS,
        "OFFSET_UNIT": OFFSET_UNIT,
    }  # fmt: skip
