"""Which place a site's launches get beside its GEMM."""

from __future__ import annotations

import pytest

from kernels.lora_site_tuning import LATER, ORDERS, SAME, SOONER, site_tuning
from kernels.lora_tables import PREFILL_TILE_ROWS, TILE_ROWS
from kernels.lora_tuning import delta_tuning, num_splits, shrink_tuning

QKV, OUT, GATE_UP, DOWN = (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)
#: the same sites of a model with a tenth of the parameters
SMALL = {QKV: (1024, 1536), OUT: (1024, 1024), GATE_UP: (1024, 7168), DOWN: (3584, 1024)}


@pytest.mark.parametrize("site", [QKV, OUT, GATE_UP, DOWN])
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 1025, 4096])
def test_partial_sums_of_a_site_are_the_same_at_every_number_of_rows(
    site: tuple[int, int], rows: int
) -> None:
    tuning = site_tuning(*site, rows, TILE_ROWS)
    assert -(-site[0] // tuning.shrink.split_k) == num_splits(site[0])
    assert tuning.shrink.split_k % tuning.shrink.block_k == 0
    assert tuning.shrink.split_k % tuning.shrink.dot_k == 0


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64, 128, 256, 512, 1024])
def test_a_site_of_a_smaller_model_stands_like_its_like(rows: int) -> None:
    for site, small in SMALL.items():
        own, other = site_tuning(*small, rows, TILE_ROWS), site_tuning(*site, rows, TILE_ROWS)
        assert (own.order, own.priority, own.processors, own.shrink.programs) == (
            other.order, other.priority, other.processors, other.shrink.programs,
        )  # fmt: skip


def test_steps_of_up_to_1024_rows_have_places_by_rows_and_more_go_on_a_sooner_branch() -> None:
    places = {
        rows: [
            (tuning.order, tuning.priority, tuning.processors, tuning.delta.programs)
            for tuning in (site_tuning(*site, rows, TILE_ROWS) for site in SMALL)
        ]
        for rows in (1, 8, 32, 64, 128, 256, 512, 1024, 2048)
    }
    assert len({str(place) for place in places.values()}) == len(places)
    assert [place[2] for place in places[64]] == [44, 56, 88, 66]
    assert places[1][2] == ("GEMM", LATER, 112, 528)
    assert [place[:3] for place in places[2048]] == [("branch", SOONER, 0)] * 4
    assert all(place[0] in ORDERS for each in places.values() for place in each)


def test_long_segments_take_the_kernels_of_prefill_as_they_are() -> None:
    for site in SMALL:
        tuning = site_tuning(*site, 256, PREFILL_TILE_ROWS)
        priority = SAME if site == DOWN else SOONER
        assert tuning.shrink == shrink_tuning(site[0], PREFILL_TILE_ROWS)
        assert tuning.delta == delta_tuning(site[1], PREFILL_TILE_ROWS, 2)
        assert (tuning.order, tuning.priority) == ("branch", priority)
