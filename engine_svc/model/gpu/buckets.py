"""Padded numbers of rows for which steps are captured or shaped. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

#: decodes of engines of up to _USUAL sequences; larger ones double throughout
_SMALL = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_USUAL = 512
#: captures in all: decodes with and without LoRA, steps with prompts always with it, the largest
#: with short and with long work items
MAX_CAPTURES = 30
#: rows of steps with prompts that are worth a graph: larger ones hide their launches. No coarser
#: than those of padded_rows, since a product of that many rows takes as long as it has rows
_MIXED = (128, 256, 384, 512, 640, 768, 896, 1024)
#: rows of steps with prompts up to which LoRA's work items are short, whatever the step holds
FEW_ROWS = 512
#: rows of larger steps are padded to a multiple of this share of a power of two
_STEPS_AN_OCTAVE = 4


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """At most 13 sizes up to max_num_seqs ≤ 4096, which is the last one."""
    doubling = tuple(1 << bit for bit in range(max_num_seqs.bit_length()))
    sizes = _SMALL if max_num_seqs <= _USUAL else doubling
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def mixed_buckets(decodes: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """Sizes of captured steps with prompts, within what MAX_CAPTURES leaves."""
    room = MAX_CAPTURES - 2 * len(decodes)
    return tuple(size for size in _MIXED if size <= max_rows)[: max(room, 0)]


def long_buckets(decodes: Sequence[int], mixed: Sequence[int]) -> tuple[int, ...]:
    """Sizes of captured steps with prompts that have a second graph, of long LoRA work items: the
    largest, as far as MAX_CAPTURES goes."""
    room = MAX_CAPTURES - 2 * len(decodes) - len(mixed)
    return tuple(size for size in mixed[-room:] if size > FEW_ROWS) if room > 0 else ()


def bucket_of(sizes: Sequence[int], rows: int) -> int | None:
    """The smallest size that holds `rows`; None: there is none."""
    at = bisect.bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None


def padded_rows(rows: int, max_rows: int) -> int:
    """Rows of a step without a graph: few shapes, little padding."""
    if rows <= 16:
        return min(16, max_rows)
    unit = max(16, (1 << (rows - 1).bit_length()) // 2 // _STEPS_AN_OCTAVE)
    return min(-(-rows // unit) * unit, max_rows)
