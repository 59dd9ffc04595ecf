"""Decode and prefill attention in Triton against dense attention in fp64, canaries around.

On a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU (test_interpreter.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kernels.attention_tuning import DecodeTuning, PrefillTuning
from kernels.decode_attention import DecodeScratch
from kernels.decode_attention_triton import decode_attention_triton
from kernels.prefill_attention import tile_rows
from kernels.prefill_attention_triton import prefill_attention_triton
from tests.kernel.attention_case import LAYER, AttentionCase, attention_case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

#: (H, Hk, D): groups of 1, 3, 4, 5, 8, 16; every head dimension
HEADS = [(3, 3, 64), (9, 3, 64), (10, 2, 80), (8, 2, 96), (8, 2, 128), (8, 1, 256), (16, 1, 128)]
SHAPES = [
    *((heads, torch.float16) for heads in HEADS),
    *((HEADS[i], dtype) for i in (1, 4, 5) for dtype in (torch.float32, torch.bfloat16)),
]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97]
#: parts of 32 positions and more, so that short contexts have several
SPLIT = DecodeTuning(block_n=32, num_warps=4, num_stages=2, splits=4, min_chunk=32)
WHOLE = DecodeTuning(block_n=32, num_warps=4, num_stages=2, splits=1, min_chunk=32)
TILE = PrefillTuning(queries=64, block_n=32, num_warps=4, num_stages=2)
#: the products of fp32 take more shared memory
SMALL_TILE = PrefillTuning(queries=32, block_n=32, num_warps=4, num_stages=1)
CHUNKS = [(0, 1), (0, 16), (17, 5), (0, 40), (40, 33), (95, 1)]


def scratch(case: AttentionCase, tuning: DecodeTuning) -> DecodeScratch:
    """Exactly as large as needed; NaN where nothing was written."""
    parts = case.decode_rows.shape[0] * tuning.splits * case.q.shape[1]
    return DecodeScratch(
        torch.full((parts * case.q.shape[2],), torch.nan, device=DEVICE),
        torch.full((parts,), torch.nan, device=DEVICE),
        torch.zeros(
            case.decode_rows.shape[0] * case.num_kv_heads, dtype=torch.int32, device=DEVICE
        ),
    )


def decode(case: AttentionCase, tuning: DecodeTuning = SPLIT, window: int = 0) -> torch.Tensor:
    room = scratch(case, tuning)
    out = case.empty_out()
    returned = decode_attention_triton(
        case.q, case.pages, case.page_table, case.decode_rows, case.row_seat, case.positions, LAYER,
        case.num_kv_heads, window, out, room, tuning=tuning,
    )  # fmt: skip
    assert returned is out
    assert room.arrived.tolist() == [0] * room.arrived.numel()
    return out


def prefill(case: AttentionCase, tuning: PrefillTuning = TILE, window: int = 0) -> torch.Tensor:
    out = case.empty_out()
    returned = prefill_attention_triton(
        case.q, case.pages, case.page_table, case.tiles, case.num_tiles, LAYER, case.num_kv_heads,
        window, out, tuning=tuning,
    )  # fmt: skip
    assert returned is out
    return out


def one_row_each(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(length - 1, 1) for length in lengths]


@pytest.mark.parametrize(("heads", "dtype"), SHAPES)
def test_decode_of_every_shape_equals_dense_attention(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = attention_case(one_row_each([1, 33, 130]), heads, dtype, device=DEVICE)
    case.check(decode(case))


@pytest.mark.parametrize("tuning", [SPLIT, WHOLE])
def test_decode_of_every_length_equals_dense_attention(tuning: DecodeTuning) -> None:
    case = attention_case(one_row_each(LENGTHS), (6, 2, 64), torch.float16, device=DEVICE)
    case.check(decode(case, tuning))


@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_decode_of_every_page_size_equals_dense_attention(page_size: int) -> None:
    case = attention_case(
        one_row_each([1, 40, 300]), (9, 3, 64), torch.float32, page_size=page_size, device=DEVICE
    )
    case.check(decode(case))


@pytest.mark.parametrize("window", [1, 16, 50, 1000])
def test_decode_sees_its_window_only(window: int) -> None:
    lengths = one_row_each([1, 16, 51, 120])
    case = attention_case(lengths, (6, 2, 64), torch.float32, window=window, device=DEVICE)
    case.check(decode(case, window=window))


def test_decode_of_padding_rows_writes_nothing() -> None:
    case = attention_case([], (6, 2, 64), torch.float16, padding=3, device=DEVICE)
    case.check(decode(case))
    case = attention_case([], (6, 2, 64), torch.float16, padding=0, device=DEVICE)
    case.check(decode(case))


@pytest.mark.parametrize(("heads", "dtype"), SHAPES)
def test_prefill_of_every_shape_equals_dense_attention(
    heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows, chunks = tile_rows(heads[0], heads[1]), [(0, 7), (33, 9)]
    case = attention_case(chunks, heads, dtype, rows_a_tile=rows, device=DEVICE)
    case.check(prefill(case, SMALL_TILE if dtype == torch.float32 else TILE))


@pytest.mark.parametrize("queries", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 20, 42])
def test_prefill_of_every_chunk_equals_dense_attention(rows: int, queries: int) -> None:
    """Groups of three: a program may begin in the middle of a row's heads."""
    case = attention_case(CHUNKS, (6, 2, 64), torch.float16, rows_a_tile=rows, device=DEVICE)
    case.check(prefill(case, replace(TILE, queries=queries)))


@pytest.mark.parametrize("page_size", [16, 32, 256])
def test_prefill_of_every_page_size_equals_dense_attention(page_size: int) -> None:
    case = attention_case(
        [(0, 50), (270, 20)], (9, 3, 64), torch.float32, page_size=page_size, rows_a_tile=21,
        device=DEVICE,
    )  # fmt: skip
    case.check(prefill(case))


@pytest.mark.parametrize("window", [1, 16, 50, 1000])
def test_prefill_rows_see_their_window_only(window: int) -> None:
    case = attention_case(
        CHUNKS, (6, 2, 64), torch.float32, window=window, rows_a_tile=21, device=DEVICE
    )
    case.check(prefill(case, window=window))


def test_prefill_without_tiles_writes_nothing() -> None:
    case = attention_case([], (6, 2, 64), torch.float16, rows_a_tile=16, device=DEVICE)
    case.check(prefill(case))
