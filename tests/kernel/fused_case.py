"""Random inputs of the kernels that consume a LoRA site's output.

Everything that no kernel may read is NaN, everything that none may write is a canary.
"""

from __future__ import annotations

import torch

from kernels.lora_tables import LoraDelta, SiteTable
from tests.kernel.lora_case import CANARY, ArenaBuilder

CELL, NUM_CELLS = 1, 3
#: of each slot: whether it has a delta, whether it has a gain
SLOTS = ((True, False), (True, True), (False, True), (False, False))
#: what one rounding to a dtype may differ by, after fp32 sums in two orders
ROUNDING = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2**-10, "atol": 2**-12},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9},
}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def padded(values: torch.Tensor, device: str, fill: float = torch.nan) -> torch.Tensor:
    """The rows inside a larger buffer of `fill`, at a 16-byte boundary."""
    rows, width = values.shape
    buffer = torch.full((rows + 2, width + 16), fill, dtype=values.dtype)
    buffer[1:-1, :width] = values
    return buffer.to(device)[1:-1, :width]


def row_slots(num_rows: int) -> torch.Tensor:
    """[num_rows] int32: runs of every slot, and rows without an adapter among them."""
    return (torch.arange(num_rows, dtype=torch.int32) // 2 * 3 + 1) % (len(SLOTS) + 1) - 1


def delta_case(num_rows: int, width: int, dtype: torch.dtype, device: str) -> LoraDelta:
    arena = ArenaBuilder()
    g_off = torch.full((len(SLOTS), NUM_CELLS), -1, dtype=torch.int64)
    live = torch.ones((len(SLOTS), NUM_CELLS), dtype=torch.uint8)
    for slot, (has_delta, has_gain) in enumerate(SLOTS):
        live[slot, CELL] = has_delta
        if has_gain:
            g_off[slot, CELL] = arena.add(1.0 + 0.1 * normal(width, seed=slot))
    none = torch.full((len(SLOTS), 1, 1), -1, dtype=torch.int64)
    rank, scale = torch.zeros((len(SLOTS), 1), dtype=torch.int32), torch.zeros((len(SLOTS), 1))
    c_off = torch.full_like(g_off, -1)
    parts = (arena.build(), none, none, rank, scale, g_off, c_off, live)
    table = SiteTable(*(part.to(device) for part in parts))
    slots = row_slots(num_rows)
    values = normal(num_rows, width, seed=99, dtype=dtype)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0 or not SLOTS[slot][0]:
            values[row] = torch.nan
    # rows of a larger step behind those under test
    behind = torch.tensor([0, 1], dtype=torch.int32)
    return LoraDelta(padded(values, device), torch.cat([slots, behind]).to(device), table, CELL)


def canary_like(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, CANARY, dtype=dtype, device=device)
