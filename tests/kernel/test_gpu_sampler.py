"""GpuSampler on a GPU against the sampler of the CPU engine, one step ahead and without waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine_svc.model.gpu.sampler import GpuSampler
from engine_svc.model.gpu.sampler_state import SamplerState
from engine_svc.model.logprobs import rank_tokens
from engine_svc.model.sampler import Sampler
from engine_svc.model.seats import SeatState
from engine_svc.types import SamplingParams, SeatOpening

pytestmark = pytest.mark.gpu
VOCAB, SEATS = 5000, 16
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 20},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 5},
    {"temperature": 0.0, "logit_bias": ((7, 50.0),), "logprobs": 0},
    {"min_tokens": 4, "eos_token_ids": (1,), "stop_token_ids": (2,), "temperature": 0.0},
    {"top_k": 900, "top_p": 0.95, "temperature": 2.0},
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that waits for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tokens_of_every_wish_equal_the_cpu_engine_one_step_ahead() -> None:
    openings = [
        SeatOpening(15 - row, SamplingParams(64, seed=row, **wish), row % 3, (4, 5, 6), (9, 9))
        for row, wish in enumerate(WISHES)
    ]
    oracle_state = SeatState(SEATS, VOCAB, torch.device("cpu"))
    for opening in openings:
        oracle_state.open(opening)
    oracle, cuda = Sampler(oracle_state), torch.device("cuda")
    sampler = GpuSampler(SamplerState(SEATS, VOCAB, 64, cuda), 16, cuda)
    seats = [opening.seat for opening in openings]
    random = torch.Generator().manual_seed(0)
    masks = {seats[1]: bytes(range(1, 200)), seats[3]: b"\xff" * 40}
    steps = []
    for step in range(8):
        logits = 3 * torch.randn(len(seats), VOCAB, generator=random)
        # the head's graph has rows of padding
        padded = torch.full((16, VOCAB), torch.nan, device="cuda", dtype=torch.bfloat16)
        padded[: len(seats)] = logits.bfloat16()
        steps.append((padded, [5 + step] * len(seats), masks if step == 4 else {}))
    torch.cuda.synchronize()
    # first launches compile and allocate
    sampler.take(sampler.launch(steps[0][0], [], [], {}))
    pending, taken = [], []
    for padded, positions, step_masks in steps:
        with no_waiting():
            if not pending:
                sampler.open(openings)
            pending.append(sampler.launch(padded, seats, positions, step_masks))
        if len(pending) > 1:
            taken.append(sampler.take(pending[-2]))
    taken.append(sampler.take(pending[-1]))
    for (padded, positions, step_masks), got in zip(steps, taken, strict=True):
        logits = padded[: len(seats)].float().cpu()
        expected = oracle.sample(logits, seats, positions, step_masks)
        assert got.tokens == expected.tolist()
        ranked = rank_tokens(logits[5:6], expected[5:6], 5).rows(expected[5:6].tolist(), [5])[0]
        assert got.logprobs[5].logprob == pytest.approx(ranked.logprob, abs=1e-4)
        _assert_same_top(got.logprobs[5].top, ranked.top)
        assert sorted(got.logprobs) == [5, 6]
    assert sampler.last_token.cpu()[seats].tolist() == oracle_state.last_token[seats].tolist()


#: of log probabilities of one logit by two ways of summing
_CLOSE = 1e-4


def _assert_same_top(
    found: Sequence[tuple[int, float]], right: Sequence[tuple[int, float]]
) -> None:
    """Tokens of equal logits may come in either order, and of those that tie for the last place any
    may be named."""
    assert [value for _, value in found] == pytest.approx([v for _, v in right], abs=_CLOSE)
    tokens, right_tokens = ([token for token, _ in top] for top in (found, right))
    first = 0
    for end in range(1, len(right)):
        if right[end - 1][1] - right[end][1] > _CLOSE:
            assert sorted(tokens[first:end]) == sorted(right_tokens[first:end])
            first = end
