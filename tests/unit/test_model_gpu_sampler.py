"""GpuSampler on CPU tensors against the sampler of the CPU engine, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_svc.model.gpu.sampler import GpuSampler
from engine_svc.model.gpu.sampler_state import SamplerState
from engine_svc.model.logprobs import rank_tokens
from engine_svc.model.sampler import Sampler
from engine_svc.model.seats import SeatState
from engine_svc.types import SamplingParams, SeatOpening

CPU = torch.device("cpu")
VOCAB, SEATS, ROWS = 300, 16, 12

WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "cold": {"temperature": 1e-5},
    "hot": {"temperature": 100.0, "top_p": 0.9},
    "top_k": {"top_k": 7},
    "top_k of the whole vocabulary": {"top_k": 2**31 - 1},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "all three": {"top_k": 20, "top_p": 0.7, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "a penalty near zero": {"repetition_penalty": 1e-38, "temperature": 0.0},
    "negative penalties": {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    "bias": {"logit_bias": ((3, 4.0), (9, -100.0), (299, 2.5)), "temperature": 0.5},
    "bans": {"min_tokens": 6, "eos_token_ids": (0, 4), "stop_token_ids": (4, 8)},
}


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "seed": 11, **changes})


def pair(*openings: SeatOpening) -> tuple[GpuSampler, Sampler, SeatState]:
    state = SeatState(SEATS, VOCAB, CPU)
    for opening in openings:
        state.open(opening)
    sampler = GpuSampler(SamplerState(SEATS, VOCAB, 64, CPU), ROWS, CPU)
    sampler.open(openings)
    return sampler, Sampler(state), state


def logits_of(rows: int, seed: int) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("wish", WISHES)
def test_every_wish_gives_the_tokens_of_the_cpu_engine_over_many_steps(wish: str) -> None:
    openings = [
        SeatOpening(seat, params(**WISHES[wish]), choice, (1, 2, 3), outputs)
        for seat, choice, outputs in ((5, 0, ()), (2, 1, (7, 7, 9)))
    ]
    sampler, oracle, state = pair(*openings)
    for step in range(12):
        logits, positions = logits_of(2, step), [3 + step, 6 + step]
        expected = oracle.sample(logits, [5, 2], positions, {}).tolist()
        taken = sampler.take(sampler.launch(logits, [5, 2], positions, {}))
        assert taken.tokens == expected
        assert sampler.last_token[[5, 2]].tolist() == state.last_token[[5, 2]].tolist()
        assert taken.logprobs == {}


def test_a_mixed_batch_equals_the_cpu_engine_and_padding_changes_nothing() -> None:
    openings = [
        SeatOpening(seat + 1, params(**wish, seed=seat), 0, (1, 2))
        for seat, wish in enumerate(list(WISHES.values())[:10])
    ]
    sampler, oracle, _ = pair(*openings)
    seats, positions = [opening.seat for opening in openings], list(range(2, 12))
    logits = logits_of(10, seed=3)
    expected = oracle.sample(logits, seats, positions, {}).tolist()
    padded = torch.cat([logits, torch.full((2, VOCAB), torch.nan)])
    assert sampler.take(sampler.launch(padded, seats, positions, {})).tokens == expected
    assert sampler.last_token[0] == 0


def test_token_masks_equal_the_cpu_engine() -> None:
    openings = [SeatOpening(seat, params(seed=seat), 0, (1,)) for seat in range(3)]
    # the first allows a few tokens, the second none, and the last row has no mask
    masks = {0: bytes([0b10010000, 0b1]), 1: bytes(VOCAB // 8 + 1)}
    for step in range(6):
        sampler, oracle, _ = pair(*openings)
        logits = logits_of(3, step)
        expected = oracle.sample(logits, [0, 1, 2], [4, 4, 4], masks).tolist()
        taken = sampler.take(sampler.launch(logits, [0, 1, 2], [4, 4, 4], masks))
        assert taken.tokens == expected
        assert taken.tokens[0] in (4, 7, 8)
        assert taken.tokens[1] == -1
        # the next step has no masks
        expected = oracle.sample(logits[:2], [0, 1], [5, 5], {}).tolist()
        assert sampler.take(sampler.launch(logits[:2], [0, 1], [5, 5], {})).tokens == expected


@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_minus_one_and_its_seat_keeps_zero(fault: float) -> None:
    sampler, _, _ = pair(*(SeatOpening(s, params(temperature=0.0), 0, (1,)) for s in (0, 1)))
    logits = logits_of(2, seed=0)
    logits[0, 17] = fault
    taken = sampler.take(sampler.launch(logits, [0, 1], [1, 1], {}))
    assert taken.tokens == [-1, int(logits[1].argmax())]
    assert sampler.last_token[:2].tolist() == [0, taken.tokens[1]]


def test_log_probabilities_are_those_of_the_model_before_any_rule() -> None:
    wishes = [{"logprobs": 3, "logit_bias": ((5, 50.0),)}, {}, {"logprobs": 0}, {"logprobs": 20}]
    openings = [SeatOpening(seat, params(**w), 0, (1,)) for seat, w in enumerate(wishes)]
    sampler, _, _ = pair(*openings)
    logits = logits_of(4, seed=5)
    taken = sampler.take(sampler.launch(logits, [0, 1, 2, 3], [1] * 4, {}))
    assert taken.tokens[0] == 5
    assert sorted(taken.logprobs) == [0, 2, 3]
    asked = [0, 2, 3]
    tokens = [taken.tokens[row] for row in asked]
    expected = rank_tokens(logits[asked], torch.tensor(tokens), 20).rows(tokens, [3, 0, 20])
    for row, want in zip(asked, expected, strict=True):
        got = taken.logprobs[row]
        assert (got.token_id, [i for i, _ in got.top]) == (want.token_id, [i for i, _ in want.top])
        assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
        assert [v for _, v in got.top] == pytest.approx([v for _, v in want.top], abs=1e-5)


def test_no_more_tokens_are_reported_than_the_vocabulary_has() -> None:
    vocab = 10
    sampler = GpuSampler(SamplerState(1, vocab, 64, CPU), 1, CPU)
    sampler.open([SeatOpening(0, params(logprobs=20), 0, (1,))])
    logits = logits_of(1, seed=2)[:, :vocab]
    (found,) = sampler.take(sampler.launch(logits, [0], [1], {})).logprobs.values()
    assert sorted(token for token, _ in found.top) == list(range(vocab))


@pytest.mark.parametrize(
    "others", [{}, {"logit_bias": ((7, 1.0),)}, {"min_tokens": 9, "eos_token_ids": (5,)}]
)
def test_a_seat_that_is_taken_again_forgets_the_sequence_before(others: dict[str, Any]) -> None:
    rules = WISHES["penalties"] | WISHES["bias"] | WISHES["bans"]
    first = SeatOpening(3, params(**rules), 0, (1, 2), (4, 4))
    others = {**WISHES["penalties"], **others}
    second = SeatOpening(3, params(**others), 0, (9, 8))
    sampler, oracle, state = pair(first)
    logits = logits_of(1, seed=1)
    sampler.take(sampler.launch(logits, [3], [4], {}))
    oracle.sample(logits, [3], [4], {})
    sampler.open([second])
    state.open(second)
    for step in range(5):
        logits = logits_of(1, seed=step)
        expected = oracle.sample(logits, [3], [2 + step], {}).tolist()
        assert sampler.take(sampler.launch(logits, [3], [2 + step], {})).tokens == expected


def test_a_sequence_back_after_a_preemption_continues_from_its_last_token() -> None:
    sampler, _, _ = pair(SeatOpening(6, params(), 0, (1, 2), (40, 41)))
    assert sampler.last_token[6] == 41


def test_results_of_a_step_stay_until_the_next_but_one_is_finished() -> None:
    sampler, _, _ = pair(SeatOpening(0, params(temperature=0.0, logprobs=1), 0, (1,)))
    steps = [logits_of(1, seed) for seed in range(5)]
    pending = [sampler.launch(logits, [0], [1], {}) for logits in steps[:2]]
    for step, logits in enumerate(steps):
        best = int(logits.argmax())
        taken = sampler.take(pending.pop(0))
        assert taken.tokens == [best]
        assert taken.logprobs[0].top[0][0] == best
        if step + 2 < len(steps):
            pending.append(sampler.launch(steps[step + 2], [0], [1], {}))


def test_an_empty_step_samples_nothing() -> None:
    sampler, _, _ = pair()
    taken = sampler.take(sampler.launch(torch.empty(0, VOCAB), [], [], {}))
    assert taken.tokens == []
