"""kernels.sample where only a GPU can go: real vocabularies, and captured graphs."""

from __future__ import annotations

import pytest
import torch

from kernels import sample as reference
from kernels.sample_triton import sample_triton
from tests.kernel.sample_case import CANARY, Wish, sample_case
from tests.kernel.sample_checks import CUTS, RULES, VOCAB, WIDE_CUTS, check, normal

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_rows_as_large_as_a_real_vocabulary_equal_the_reference(spread: float) -> None:
    wishes: list[Wish | None] = [*CUTS, *WIDE_CUTS, *RULES, Wish(), Wish(1.0), None]
    logits = normal(len(wishes), 128256, seed=13, spread=spread).bfloat16()
    check(sample_case(logits, wishes, seed=14))


def test_one_captured_launch_serves_rows_that_ask_for_something_else() -> None:
    first = sample_case(normal(6, VOCAB, seed=20), [Wish()] * 6)
    case, scratch = first.to("cuda"), first.to("cuda").scratch()

    def step() -> None:
        sample_triton(case.logits, case.rows, case.table, scratch, case.tokens)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed, wishes in enumerate(([*CUTS[:5], None], [*WIDE_CUTS[:3], *RULES[:3]], [Wish()] * 6)):
        later = sample_case(normal(6, VOCAB, seed=21 + seed), list(wishes), seed=seed)
        expected = later.to("cpu")
        reference.sample(expected.logits, expected.rows, expected.table, scratch, expected.tokens)
        case.logits.copy_(later.logits)
        case.tokens.fill_(CANARY)
        for name in ("seats", "positions", "numbers"):
            getattr(case.rows, name).copy_(getattr(later.rows, name))
        for name in ("words", "tally", "bias", "last_token"):
            getattr(case.table, name).copy_(getattr(later.table, name))
        graph.replay()
        assert torch.equal(case.tokens.cpu(), expected.tokens)
