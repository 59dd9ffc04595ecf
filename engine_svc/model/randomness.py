"""Counter-based randomness: a pure function of (seed, choice, position), so that neither batch
layout nor preemption changes a result."""

from __future__ import annotations

import hashlib
import struct

_COUNTER = struct.Struct("<QQQ")
_BITS = 53


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. `position` counts tokens of the sequence before the
    drawn one; seed is taken modulo 2**64."""
    block = _COUNTER.pack(seed % 2**64, choice, position)
    word = int.from_bytes(hashlib.blake2b(block, digest_size=8).digest(), "little")
    return float((word >> (64 - _BITS)) * 2.0**-_BITS)
