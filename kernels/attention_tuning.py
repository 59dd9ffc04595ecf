"""Constants of the attention kernels by the size of a launch, so that a captured one keeps them.

Measured on an H200 (triton 3.6, bf16, 8 KV heads of 128; µs a layer at 640 positions a row);
`python -m benchmarks.attention --sweep` measures the candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

#: queries of a prefill tile: positions times the heads that share a KV head
TILE_QUERIES = 128
#: bytes of one position of one head up to which the measured kernels hold
USUAL_BYTES = 256


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Args:
    block_n: positions an iteration.
    splits: parts of a context at most; part of the grid.
    min_chunk: positions below which a part is not split further.
    """

    block_n: int
    num_warps: int
    num_stages: int
    splits: int
    min_chunk: int


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Args:
    queries: of a tile's TILE_QUERIES in one program.
    block_n: positions an iteration.
    """

    queries: int
    block_n: int
    num_warps: int
    num_stages: int


#: by rows × KV heads up to which they hold. 256 programs fill the GPU: more parts than that cost
#: more than they hide, an empty program included (8 rows: 4 parts 12.2, 8 parts 12.8, 16 parts
#: 17.4), and two warps a program are better than four until there are 1024 programs.
_DECODE = (
    (8, DecodeTuning(64, 2, 2, 32, 64)),  # 1 row: 8.2 (block_n 32, 4 stages: 8.7)
    (16, DecodeTuning(32, 2, 4, 16, 64)),
    (32, DecodeTuning(32, 2, 4, 8, 64)),
    (64, DecodeTuning(32, 2, 4, 4, 128)),  # 8 rows: 12.3 (4 warps, 16 parts: 20.7)
    (128, DecodeTuning(32, 2, 4, 2, 256)),
    (512, DecodeTuning(32, 2, 4, 4, 1024)),  # 64 rows: 45.7 (4 warps, 5 parts: 60.9)
)
#: 128 rows: 83.8; 256 rows: 161.6 (one part at most: 160.5, but a long context would run alone)
_DECODE_MANY = DecodeTuning(64, 4, 2, 4, 1024)


def decode_tuning(num_rows: int, num_kv_heads: int, dim: int, item_bytes: int) -> DecodeTuning:
    """Args: num_rows, of the launch, those that are none included."""
    items = num_rows * num_kv_heads
    tuning = next((found for most, found in _DECODE if items <= most), _DECODE_MANY)
    if dim * item_bytes > USUAL_BYTES:
        # not tuned
        return DecodeTuning(32, 4, 3, tuning.splits, tuning.min_chunk)
    return tuning


def most_parts(max_rows: int, num_kv_heads: int) -> int:
    """Parts of all rows in any launch of up to `max_rows` rows."""
    return max(
        rows * decode_tuning(rows, num_kv_heads, 1, 1).splits for rows in range(1, max_rows + 1)
    )


#: rows of a launch up to which small programs, of which there are more, are faster
_FEW_ROWS = 512
#: 16 prompts of 512: 173 µs (_PREFILL_MANY: 202)
_PREFILL_FEW = PrefillTuning(64, 64, 4, 3)
#: 177 µs, 1277 µs
_PREFILL_LITTLE_SHARED = PrefillTuning(128, 64, 8, 3)
#: one prompt of 8192: 1148 µs (_PREFILL_FEW: 1308); 4 × 2048 after 6144: 2061 (2355);
#: 64 × 17 after 1000: 105 (113). It takes 224 KiB of shared memory.
_PREFILL_MANY = PrefillTuning(128, 128, 8, 3)
_PREFILL_MANY_SHARED = 224 * 1024


def prefill_tuning(num_rows: int, dim: int, item_bytes: int, shared_bytes: int) -> PrefillTuning:
    """Args: num_rows, of the launch; shared_bytes, that one program may take on this GPU."""
    if item_bytes == 4:
        return PrefillTuning(32, 32, 4, 2 if dim <= 128 else 1)
    if dim * item_bytes > USUAL_BYTES:
        return PrefillTuning(TILE_QUERIES, 32, 8, 3)
    if shared_bytes < _PREFILL_MANY_SHARED:
        return _PREFILL_LITTLE_SHARED
    return _PREFILL_FEW if num_rows <= _FEW_ROWS else _PREFILL_MANY
