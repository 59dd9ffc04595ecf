"""kernels.sample and kernels.rank_tokens in Triton against the plain-torch references.

On a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on the CPU (test_interpreter.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import sample as reference
from kernels.rank_tokens import rank_scratch, rank_tokens
from kernels.rank_tokens_triton import rank_tokens_triton
from tests.kernel.sample_case import CANARY, Wish, sample_case
from tests.kernel.sample_checks import (
    CUTS,
    DEVICE,
    INTERPRETED,
    RULES,
    SEEN,
    VOCAB,
    WIDE_CUTS,
    check,
    normal,
)  # fmt: skip

pytestmark = [
    # the interpreter computes with NumPy, which warns of what becomes -1
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_and_drawn_rows_equal_the_reference(dtype: torch.dtype) -> None:
    wishes = [Wish(), Wish(1.0), Wish(0.1), Wish(100.0), None, Wish(1e-5)]
    check(sample_case(normal(6, VOCAB).to(dtype), wishes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cut_rows_equal_the_reference(dtype: torch.dtype) -> None:
    check(sample_case(normal(len(CUTS), VOCAB, seed=1).to(dtype), list(CUTS), seed=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_whose_cut_needs_the_whole_vocabulary_equal_the_reference(dtype: torch.dtype) -> None:
    logits = normal(len(WIDE_CUTS), VOCAB, seed=2, spread=1.5).to(dtype)
    check(sample_case(logits, list(WIDE_CUTS), seed=4))


def test_rules_equal_the_reference_and_count_what_was_drawn() -> None:
    case = sample_case(normal(len(RULES), VOCAB, seed=5), list(RULES), seed=6)
    tokens = check(case)
    assert tokens[2] == 3 or tokens[2] in SEEN["prompt"] + SEEN["outputs"]
    assert tokens[5] == 7


def test_ties_are_kept_together_and_the_greedy_token_is_the_first_of_equals() -> None:
    logits = torch.zeros(6, VOCAB)
    # four equal tokens in two blocks
    logits[:, [5, 900, 3000, 4170]] = 4.0
    wishes = [Wish(), *(Wish(1.0, top_k=2) for _ in range(5))]
    seen: set[int] = set()
    for seed in range(3):
        tokens = check(sample_case(logits, list(wishes), seed=seed))
        assert tokens[0] == 5
        seen |= set(tokens[1:].tolist())
    assert seen == {5, 900, 3000, 4170}


def test_a_row_of_equal_logits_is_drawn_from_all_of_them() -> None:
    wishes = [Wish(1.0, top_k=3), Wish(1.0, top_p=0.5), Wish(1.0, min_p=1.0), Wish(), Wish(1.0)]
    tokens = check(sample_case(torch.full((5, VOCAB), 0.25), wishes))
    assert tokens[3] == 0


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("column", [0, VOCAB - 1])
def test_a_row_that_is_not_finite_is_minus_one_and_the_others_are_not(
    fault: float, column: int
) -> None:
    logits = normal(4, VOCAB, seed=7)
    logits[1:3, column] = fault
    wishes = [Wish(), Wish(presence=1.0), Wish(1.0, top_k=4), Wish(1.0)]
    tokens = check(sample_case(logits, wishes))
    assert (tokens == -1).tolist() == [False, True, True, False]


def test_masks_leave_what_they_allow_and_no_token_at_all_is_minus_one() -> None:
    masks = {0: [3, 4000], 1: [], 3: [VOCAB - 1], 4: list(range(0, VOCAB, 2))}
    wishes = [Wish(1.0, top_p=0.9), Wish(), Wish(1.0), Wish(1.0), Wish(bias={1: 90.0, 2: 80.0})]
    tokens = check(sample_case(normal(5, VOCAB, seed=8), wishes, masks=masks))
    assert tokens[0] in (3, 4000)
    assert tokens[1] == -1
    assert tokens[3:].tolist() == [VOCAB - 1, 2]


@pytest.mark.parametrize("vocab", [1, 7, 33, reference.BLOCK, reference.BLOCK + 1])
def test_vocabularies_of_any_size_equal_the_reference(vocab: int) -> None:
    wishes = [Wish(), Wish(1.0), Wish(1.0, top_k=3), Wish(1.0, top_p=0.6), Wish(1.0, min_p=0.3)]
    check(sample_case(normal(5, vocab, seed=9), wishes))


def test_rows_of_padding_and_seats_of_others_keep_what_they_have() -> None:
    tokens = check(sample_case(normal(4, 50), [None, Wish(), None, Wish(1.0, presence=1.0)]))
    assert (tokens == CANARY).tolist() == [True, False, True, False]


def test_a_row_draws_the_same_token_alone_and_in_any_batch() -> None:
    wishes: list[Wish | None] = [*CUTS[:4], *RULES[:2], Wish(1.0)]
    case = sample_case(normal(len(wishes), VOCAB, seed=10), wishes)
    together = check(case)
    for row in range(len(wishes)):
        rows = case.rows
        alone = replace(
            case,
            logits=case.logits[row : row + 1],
            tokens=case.tokens[:1],
            rows=replace(
                rows,
                seats=rows.seats[row : row + 1],
                positions=rows.positions[row : row + 1],
                numbers=rows.numbers[row : row + 1],
            ),
        )
        assert check(alone)[0] == together[row]


def test_a_step_without_cut_rows_may_leave_the_candidates_out() -> None:
    case = sample_case(normal(3, VOCAB, seed=11), [Wish(), Wish(1.0), Wish(0.5, presence=1.0)])
    check(replace(case, rows=replace(case.rows, cut=False)))


def test_an_empty_step_launches_nothing() -> None:
    case = sample_case(torch.empty(0, 40), [])
    assert check(case).tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "top"), [(VOCAB, 20), (VOCAB, 0), (5, 5), (2049, 3)])
def test_log_probabilities_equal_the_reference(vocab: int, top: int, dtype: torch.dtype) -> None:
    logits = normal(4, vocab, seed=12).to(dtype)
    # equal logits: the first token comes first
    logits[1, : min(vocab, 4)] = 20.0
    rows, tokens = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([0, 2, 1, -1]).int()
    made = [torch.full(shape, CANARY).float() for shape in ((3,), (3, 20))]
    results = [(made[0].clone(), made[1].int(), made[1].clone()) for _ in range(2)]
    on_device = tuple(tensor.to(DEVICE) for tensor in results[1])
    scratch = rank_scratch(2, vocab, torch.device(DEVICE))
    rank_tokens(logits, rows, tokens, top, scratch, *results[0])
    rank_tokens_triton(
        logits.to(DEVICE), rows.to(DEVICE), tokens.to(DEVICE), top, scratch, *on_device
    )
    for expected, actual in zip(results[0], on_device, strict=True):
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)
