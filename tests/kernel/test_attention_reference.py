"""The plain-torch references of decode and prefill attention against dense attention in fp64."""

from __future__ import annotations

import pytest
import torch

from kernels.decode_attention import decode_attention, decode_scratch
from kernels.prefill_attention import plan_tiles, prefill_attention, tile_rows
from tests.kernel.attention_case import LAYER, AttentionCase, attention_case

DECODE = [(0, 1), (15, 1), (16, 1), (70, 1)]
CHUNKS = [(0, 5), (3, 1), (31, 18), (16, 33)]


def decode(case: AttentionCase, window: int) -> torch.Tensor:
    return decode_attention(
        case.q, case.pages, case.page_table, case.decode_rows, case.row_seat, case.positions, LAYER,
        case.num_kv_heads, window, case.empty_out(),
    )  # fmt: skip


@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_equals_dense_attention(page_size: int, window: int) -> None:
    case = attention_case(DECODE, (9, 3, 64), torch.float32, page_size=page_size, window=window)
    case.check(decode(case, window))


@pytest.mark.parametrize("window", [0, 1, 20])
@pytest.mark.parametrize("page_size", [16, 64])
def test_prefill_equals_dense_attention(page_size: int, window: int) -> None:
    case = attention_case(
        CHUNKS, (6, 2, 64), torch.float32, page_size=page_size, window=window, rows_a_tile=8
    )
    out = prefill_attention(
        case.q, case.pages, case.page_table, case.tiles, case.num_tiles, LAYER, case.num_kv_heads,
        window, case.empty_out(),
    )  # fmt: skip
    case.check(out)


def test_batch_without_rows_writes_nothing() -> None:
    case = attention_case([], (4, 1, 64), torch.float32, rows_a_tile=8)
    case.check(decode(case, 0))


def test_tiles_cover_every_row_once_and_the_longest_contexts_come_first() -> None:
    chunks = [(0, 5, 7, 0), (5, 70, 2, 100), (75, 32, 3, 0)]
    tiles = plan_tiles(chunks, 32)
    covered = sorted((first + i, start + i) for first, rows, _, start in tiles for i in range(rows))
    assert covered == [
        (first + i, start + i) for first, rows, _, start in chunks for i in range(rows)
    ]
    ends = [start + rows for _, rows, _, start in tiles]
    assert ends == sorted(ends, reverse=True)
    assert all(0 < rows <= 32 for _, rows, _, _ in tiles)


def test_tile_holds_whole_groups_of_heads() -> None:
    assert [tile_rows(heads, 3) for heads in (3, 9, 12, 48)] == [128, 42, 32, 8]


def test_scratch_on_a_cpu_holds_counts_only() -> None:
    scratch = decode_scratch(4, 9, 3, 64, torch.device("cpu"))
    assert scratch.arrived.tolist() == [0] * 12
    assert scratch.parts.numel() == 0
