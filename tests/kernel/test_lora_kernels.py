"""lora_shrink, lora_delta and lora_add in Triton against the plain-torch references,
byte for byte around.

On a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU (test_interpreter.py).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.lora_shrink_triton import lora_shrink_triton
from kernels.lora_tables import PREFILL_TILE_ROWS, RANK_BLOCK, TILE_ROWS
from kernels.lora_tuning import delta_tuning, shrink_tuning
from tests.kernel import lora_case as cases
from tests.kernel.lora_case import FIRST_ENTRY, POPULARITIES, LoraCase, rows_by_slot
from tests.kernel.lora_checks import check_all, check_delta, check_shrink

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

SPANS = ((0, 48), (48, 16), (64, 16))
MIXED_RANKS = ((8, 8, 8), (16, 0, 3), (0, 0, 0), (1, 24, 5), (4, 4, 20))


def lora_case(*args: Any, **options: Any) -> LoraCase:
    return cases.lora_case(*args, device=DEVICE, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 8, 16, 24, 100, 256])
def test_every_rank_equals_the_reference(rank: int, dtype: torch.dtype) -> None:
    segments = [(0, 3, 1), (3, 2, 0), (5, 1, -1)]
    ranks = ((rank, rank, rank), (rank, 0, 16))
    check_all(lora_case(segments, ranks, 64, SPANS, dtype, seed=rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("popularity", POPULARITIES)
def test_every_popularity_of_adapters_equals_the_reference(
    popularity: str, dtype: torch.dtype
) -> None:
    segments = rows_by_slot(popularity, 37, len(MIXED_RANKS), num_base_rows=4, seed=7)
    check_all(lora_case(segments, MIXED_RANKS, 64, SPANS, dtype, seed=7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sizes_that_are_not_multiples_of_anything_equal_the_reference(dtype: torch.dtype) -> None:
    spans = ((0, 33), (33, 7), (40, 131))
    segments = [(0, 1, 3), (1, 18, 1), (19, 3, -1)]
    check_all(lora_case(segments, MIXED_RANKS, 269, spans, dtype))


@pytest.mark.parametrize("few_rows", [1, 4, 16])
def test_rows_with_and_without_tensor_cores_give_the_same(few_rows: int) -> None:
    """With tiles of one, two, five and sixteen rows, both with and without tensor cores."""
    case = lora_case(
        [(0, 1, 0), (1, 2, 1), (3, 21, 3), (24, 2, 4)], MIXED_RANKS, 64, SPANS, torch.float16
    )
    shrink, delta = shrink_tuning(64, TILE_ROWS), delta_tuning(80, TILE_ROWS, 1)
    shrink = replace(shrink, leads=False, few_rows=few_rows)
    check_all(case, shrink, replace(delta, few_rows=few_rows))


def test_single_token_of_one_adapter_equals_the_reference() -> None:
    check_all(lora_case([(0, 1, 0)], MIXED_RANKS, 64, SPANS, torch.float16))


def test_batch_of_base_rows_only_changes_nothing() -> None:
    case = lora_case([(0, 5, -1)], MIXED_RANKS, 64, SPANS, torch.float16)
    assert case.plan.segments == ()
    check_all(case)


def test_empty_batch_changes_nothing() -> None:
    check_all(lora_case([], MIXED_RANKS, 64, SPANS, torch.float32))


def test_adapter_without_gain_and_constant_adds_its_delta_only() -> None:
    segments = [(0, 4, 0), (4, 4, 3)]
    check_all(lora_case(segments, MIXED_RANKS, 64, SPANS, torch.float32, epilogue=False))


def test_gain_and_constant_apply_where_the_rank_is_zero() -> None:
    segments = [(0, 2, 0), (2, 2, 1), (4, 2, 2)]
    check_all(lora_case(segments, ((0, 0, 0),) * 3, 64, SPANS, torch.float32))


def test_slices_that_share_one_a_equal_the_reference() -> None:
    """As an adapter that was trained on a fused linear has them."""
    case = lora_case([(0, 5, 0), (5, 2, 1)], ((20, 20, 20), (3, 3, 3)), 64, SPANS, torch.float32)
    first = case.table.a_off[:, FIRST_ENTRY].clone()
    case.table.a_off[:, FIRST_ENTRY : FIRST_ENTRY + len(SPANS)] = first[:, None]
    u = check_shrink(case)
    scale = case.table.scale[0, FIRST_ENTRY : FIRST_ENTRY + 2]
    both = u.sum(0)[:5, :, :20]
    torch.testing.assert_close(both[:, 0] / scale[0], both[:, 1] / scale[1])
    check_delta(case, u)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ranks", [MIXED_RANKS, ((32, 48, 0), (70, 3, 16))])
def test_long_segments_of_a_prefill_equal_the_reference(
    ranks: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    segments = [(0, 130, 0), (130, 3, 1), (133, 5, -1), (138, 20, 1)]
    check_all(lora_case(segments, ranks, 200, SPANS, dtype, tile_rows=PREFILL_TILE_ROWS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_wide_slices_of_a_prefill_equal_the_reference(dtype: torch.dtype) -> None:
    """More columns than B is held for at a time, and than a program has, below and above so many
    ranks; the first adapter has a constant."""
    spans = ((0, 600), (600, 272), (872, 16))
    segments = [(0, 35, 0), (35, 20, 1)]
    ranks = ((70, 40, 17), (20, 70, 64))
    check_all(lora_case(segments, ranks, 64, spans, dtype, tile_rows=PREFILL_TILE_ROWS))


def test_inputs_longer_than_one_partial_sum_equal_the_reference() -> None:
    case = lora_case([(0, 1, 0), (1, 3, 1)], MIXED_RANKS, 2100, SPANS, torch.float32)
    assert case.empty_u().shape[0] == 3
    check_all(case)


def test_one_compiled_launch_serves_a_longer_work_list() -> None:
    """The number of items is read on the device: changing it in place changes what is done."""
    case = lora_case([(0, 20, 3), (20, 20, 0)], MIXED_RANKS, 64, SPANS, torch.float32)
    full = check_shrink(case)
    # the first tile: 16 rows of slot 3
    case.plan.num_shrink_tiles.fill_(-(-max(MIXED_RANKS[3]) // RANK_BLOCK))
    out = lora_shrink_triton(
        case.x, case.table, case.plan, FIRST_ENTRY, case.columns.num_slices, case.empty_u()
    )
    torch.testing.assert_close(out.sum(0)[:16], full.sum(0)[:16], equal_nan=True)
    assert out[:, 16:].isnan().all()
