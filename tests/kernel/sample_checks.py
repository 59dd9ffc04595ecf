"""Runs kernels.sample in Triton and its reference on copies of one case and compares tokens and
seats; and the wishes that such cases are made of."""

from __future__ import annotations

import os

import torch

from kernels import sample as reference
from kernels import sample_tables as tables
from kernels.sample_triton import sample_triton
from tests.kernel.sample_case import SampleCase, Wish, allowed_by_rounding

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
#: more than one block, and the last one short
VOCAB = 2 * reference.BLOCK + 77
CUTS = [
    Wish(0.7, top_k=5), Wish(1.0, top_k=1), Wish(1.0, top_p=0.9), Wish(1.5, top_p=0.3, top_k=40),
    Wish(1.0, min_p=0.2), Wish(1.0, top_k=30, top_p=0.8, min_p=0.1), Wish(0.9, top_p=1e-6),
    Wish(1.0, top_k=VOCAB), Wish(1.0, top_k=2**31 - 1, top_p=0.5),
]  # fmt: skip
#: what the candidates of the blocks do not settle
WIDE_CUTS = [
    Wish(8.0, top_p=0.97), Wish(50.0, top_p=0.5), Wish(1.0, top_k=700), Wish(1.0, min_p=1e-4),
    Wish(2.0, top_k=300, top_p=0.9), Wish(1.0, top_k=4000, top_p=0.999, min_p=1e-3),
]  # fmt: skip
SEEN = {"prompt": (1, 2, 2100), "outputs": (3, 3, 3, 4100, 2)}
RULES = [
    Wish(repetition=1.4, **SEEN), Wish(0.8, presence=1.5, frequency=0.5, **SEEN),
    Wish(repetition=1e-38, **SEEN), Wish(0.5, repetition=1e-38, top_p=0.9, **SEEN),
    Wish(1.0, repetition=10.0, presence=-2.0, frequency=-2.0, **SEEN),
    Wish(bias={7: 30.0, 4100: -100.0}), Wish(0.6, bias={0: 3.0, 4172: 3.5}, top_k=3),
    Wish(banned=(0, 9), banned_until=11), Wish(1.0, banned=(0, 9), banned_until=10),
    Wish(0.3, repetition=1.2, bias={5: 2.0}, banned=(1, 2), banned_until=99, top_p=0.7, **SEEN),
]  # fmt: skip


def normal(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def check(case: SampleCase) -> torch.Tensor:
    """Both versions on copies of a case; returns the tokens."""
    expected, actual = case.to("cpu"), case.to(DEVICE)
    scratch = actual.scratch()
    for tensor in (scratch.maxima, scratch.sums, scratch.rests, scratch.values):
        tensor.fill_(torch.nan)
    reference.sample(expected.logits, expected.rows, expected.table, scratch, expected.tokens)
    result = sample_triton(actual.logits, actual.rows, actual.table, scratch, actual.tokens)
    assert result is actual.tokens
    tokens = actual.tokens.cpu()
    for row in (tokens != expected.tokens).nonzero().squeeze(1).tolist():
        check_rounding(case, row, int(tokens[row]))
    compare_seats(case, expected, actual)
    return tokens


def check_rounding(case: SampleCase, row: int, token: int) -> None:
    """A drawn token may differ from the reference's where fp32 rounding decides."""
    seat = int(case.rows.seats[row])
    flags = int(case.table.words[seat, tables.FLAGS])
    assert flags & tables.DRAWN, (row, token)
    assert token >= 0, row
    x = reference._adjusted(case.logits[row].float(), row, seat, flags, case.rows, case.table)
    floats = case.table.floats[seat]
    weights = torch.exp((x - x.max()) * floats[tables.INVERSE_TEMPERATURE])
    top_k = int(case.table.words[seat, tables.TOP_K])
    top_p, min_p = float(floats[tables.TOP_P]), float(floats[tables.MIN_P])
    threshold = reference._threshold(weights, top_k, top_p, min_p)
    assert allowed_by_rounding(weights, threshold, float(case.rows.numbers[row]), token), row


def compare_seats(case: SampleCase, expected: SampleCase, actual: SampleCase) -> None:
    same = (actual.tokens.cpu() == expected.tokens).tolist()
    table = case.table
    for seat in range(len(table.last_token)):
        rows = (case.rows.seats == seat).nonzero().squeeze(1).tolist()
        if rows and not same[rows[0]]:
            continue
        assert actual.table.last_token[seat] == expected.table.last_token[seat]
        assert torch.equal(actual.table.tally[seat].cpu(), expected.table.tally[seat])
    assert torch.equal(actual.table.words.cpu(), table.words)
