"""Chunks: a step's rows as columns."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
    StepPlan,
)

ROWS = (
    Chunk(5, 2, 40, 1, (), (7, 8, 9), (5,)),
    Chunk(1, 2, 0, 3, (4, 5, 6), (3,), (1, 4), 2, 9),
    Chunk(0, 2, 16, 1, (8,), (1, 2), ()),
    Chunk(3, NO_SLOT, 2, 1, (), (6,), (3,)),
)


def test_columns_yield_the_rows_that_they_were_made_of() -> None:
    chunks = Chunks.of(ROWS)
    assert tuple(chunks) == ROWS
    assert len(chunks) == 4
    assert list(chunks.prompts) == [1, 2]
    assert chunks.tokens_by_slot() == {2: 5, NO_SLOT: 1}
    plan = StepPlan(0, chunks)
    assert (plan.num_tokens, plan.num_adapters) == (6, 1)


def test_a_step_without_rows_is_empty() -> None:
    chunks = Chunks.of(())
    assert not chunks
    assert tuple(chunks) == ()
    assert StepPlan(0, chunks).num_tokens == 0


def test_decodes_move_on_by_the_origin_alone() -> None:
    decodes = [row for row in ROWS if not row.token_ids]
    chunks = replace(Chunks.of(decodes), origin=3)
    assert [chunk.start for chunk in chunks] == [row.start + 3 for row in decodes]


def test_numpy_reads_the_columns_where_they_lie() -> None:
    chunks = Chunks.of(ROWS)
    seats = np.asarray(chunks.seats)
    assert seats.dtype == np.int64
    chunks.seats[0] = 2
    assert seats.tolist() == [2, 1, 0, 3]
    assert np.asarray(array("q")).shape == (0,)


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk(0, 0, 4, 2, (), (1,), (0,)),
        Chunk(0, 0, 4, 2, (1,), (1,), (0,)),
        Chunk(0, 0, 4, 1, (), (1,), ()),
        Chunk(0, 0, 4, 1, (), (1,), (1,)),
    ],
)
def test_what_is_neither_a_prompt_nor_a_decode_is_refused(chunk: Chunk) -> None:
    with pytest.raises(ValueError, match="seat 0"):
        Chunks.of((chunk,))
