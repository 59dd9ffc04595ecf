"""How the programs of a LoRA launch share the work list of a step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kept(at):  # type: ignore[no-untyped-def]
    """What is there, a number of the work list or of a table. It stays in the second-level cache
    while weights pass through: everything that a program does waits for it."""
    return tl.load(at, eviction_policy="evict_last")


@triton.jit
def tile_at(  # type: ignore[no-untyped-def]
    tiles, at, capacity
):
    """(slot, first row, rows) of a tile of the work list. Beyond the work it is any row of the
    list, not to be used: so it can be read while the number of tiles is still on its way."""
    tile = tiles + 3 * tl.minimum(at, capacity - 1)
    return kept(tile), kept(tile + 1), kept(tile + 2)


@triton.jit
def shrink_tile_at(tiles, at, capacity):  # type: ignore[no-untyped-def]
    """(slot, first row, rows, rank block) of an item of the shrink's work list; see tile_at."""
    tile = tiles + 4 * tl.minimum(at, capacity - 1)
    return kept(tile), kept(tile + 1), kept(tile + 2), kept(tile + 3)


@triton.jit  # type: ignore[untyped-decorator]
def share(num_items, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first item, end, lane, lanes) of this program, which takes first, first + P, … below end.

    Where programs outnumber items, an item has up to LANES programs: its lanes. Lane 0 of item i
    is program i, whatever the number of items.
    """
    programs = tl.num_programs(0)
    lanes = tl.maximum(tl.minimum(programs // tl.maximum(num_items, 1), LANES), 1)
    place = tl.program_id(0)
    lane = tl.where(lanes > 1, place // tl.maximum(num_items, 1), 0)
    end = tl.where(lane < lanes, num_items, 0)
    return place - lane * num_items, end, lane, lanes
