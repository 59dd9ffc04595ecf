from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.model.logit_rules import apply_rules
from engine_svc.model.logprobs import rank_tokens
from engine_svc.model.randomness import uniform
from engine_svc.model.sampler import Sampler, keep_likely
from engine_svc.model.seats import SeatParams, SeatState
from engine_svc.types import SamplingParams, SeatOpening

CPU = torch.device("cpu")


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, "seed": 7, **changes})


def opened(
    *seats: tuple[int, SamplingParams], vocab: int = 11, prompt: tuple[int, ...] = (1, 2),
    outputs: tuple[int, ...] = (),
) -> SeatState:  # fmt: skip
    state = SeatState(8, vocab, CPU)
    for seat, sampling in seats:
        state.open(SeatOpening(seat, sampling, 0, prompt, outputs))
    return state


def sample(
    state: SeatState, logits: torch.Tensor, seats: list[int], position: int = 2
) -> list[int]:
    return Sampler(state).sample(logits, seats, [position] * len(seats), {}).tolist()


def test_temperature_zero_takes_the_largest_logit() -> None:
    logits = torch.randn(2, 11, generator=torch.Generator().manual_seed(0))
    state = opened((3, params(temperature=0.0)), (5, params(temperature=0.0)))
    assert sample(state, logits, [5, 3]) == logits.argmax(dim=1).tolist()
    assert state.last_token[[5, 3]].tolist() == logits.argmax(dim=1).tolist()


def test_drawn_tokens_follow_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, -200.0]])
    sampling = params(temperature=0.7)
    state = opened((0, sampling), vocab=5)
    draws = 4000
    counts = [0] * 5
    for position in range(draws):
        counts[sample(state, logits, [0], position)[0]] += 1
    expected = torch.softmax(logits[0] / 0.7, 0).tolist()
    assert counts[4] == 0
    for count, p in zip(counts[:4], expected[:4], strict=True):
        # five standard deviations of a binomial count
        assert abs(count - draws * p) < 5 * math.sqrt(draws * p * (1 - p))


def test_uniform_numbers_depend_on_every_part_of_the_counter() -> None:
    base = uniform(1, 0, 5)
    assert 0 <= base < 1
    assert base == uniform(1 + 2**64, 0, 5)
    others = {uniform(2, 0, 5), uniform(1, 1, 5), uniform(1, 0, 6), uniform(0, 1, 5)}
    assert len(others | {base}) == 5


def test_a_row_draws_the_same_token_in_any_batch_and_at_any_seat() -> None:
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(1))
    wishes = [
        params(seed=5, top_p=0.9, temperature=1.3),
        params(seed=6),
        # a flat row under top_p needs more than the head of the sorted vocabulary
        params(seed=7, top_p=0.99, temperature=50.0, repetition_penalty=1.2),
    ]
    alone = [
        sample(opened((0, wish), vocab=3000), logits[i : i + 1], [0], 9)[0]
        for i, wish in enumerate(wishes)
    ]
    state = opened(
        *((seat, wish) for seat, wish in zip((6, 2, 4), wishes, strict=True)), vocab=3000
    )
    assert sample(state, logits, [6, 2, 4], 9) == alone
    order = [2, 0, 1]
    assert sample(state, logits[order], [4, 6, 2], 9) == [alone[i] for i in order]


def naive_kept(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The rule in words, without ties: cut to k, then to the fewest that reach p, then by min_p."""
    ranked = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    ranked = ranked[: top_k or len(ranked)]
    total = math.fsum(probabilities[i] for i in ranked)
    kept, mass = [], 0.0
    for i in ranked:
        if kept and mass >= top_p * total:
            break
        kept.append(i)
        mass += probabilities[i]
    return {i for i in kept if probabilities[i] >= min_p * probabilities[ranked[0]]}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([2, 7, 40, 1500]),
    spread=st.sampled_from([0.1, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 1000, 1400]),
    top_p=st.sampled_from([0.01, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
)
def test_top_k_top_p_and_min_p_keep_what_the_rule_in_words_keeps(
    seed: int, vocab: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.softmax(torch.randn(1, vocab, generator=generator) * spread, 1)
    wish = params(top_k=top_k, top_p=top_p, min_p=min_p)
    kept = keep_likely(probabilities, [SeatParams(wish, 0, 2)])
    expected = naive_kept(probabilities[0].tolist(), top_k, top_p, min_p)
    found = set(kept[0].nonzero().squeeze(1).tolist())
    # one token at the edge of top_p may fall either way by rounding
    assert len(found ^ expected) <= (1 if top_p < 1 else 0)
    assert torch.equal(kept[0, sorted(found)], probabilities[0, sorted(found)])


def test_penalties_equal_the_rule_written_out() -> None:
    wish = params(
        temperature=0.0, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2,
        logprobs=0,
    )  # fmt: skip
    prompt, outputs = (1, 4), (4, 6, 6)
    state = opened((0, wish), prompt=prompt, outputs=outputs)
    logits = torch.randn(1, 11, generator=torch.Generator().manual_seed(3))
    expected = logits[0].tolist()
    for token in set(prompt + outputs):
        value = expected[token]
        value = value / 1.5 if value > 0 else value * 1.5
        count = outputs.count(token)
        expected[token] = value - 0.2 * count - (0.3 if count else 0.0)
    found = apply_rules(logits, [0], [5], state, {})
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert not torch.equal(found, logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_smallest_repetition_penalty_leaves_a_seen_token(temperature: float) -> None:
    state = opened((0, params(temperature=temperature, repetition_penalty=1e-38)), prompt=(4, 7))
    logits = torch.full((1, 11), 1.0)
    logits[0, 4] = 9.0
    assert sample(state, logits, [0])[0] in (4, 7)


def test_sampled_tokens_are_counted_for_later_penalties() -> None:
    wish = params(temperature=0.0, frequency_penalty=2.0)
    state = opened((0, wish))
    logits = torch.zeros(1, 11)
    logits[0, 3], logits[0, 8] = 1.5, 1.0
    assert [sample(state, logits, [0], position)[0] for position in range(2, 6)] == [3, 8, 0, 1]


def test_opening_a_seat_forgets_the_sequence_before() -> None:
    wish = params(temperature=0.0, frequency_penalty=2.0)
    state = opened((0, wish), outputs=(3, 3, 3))
    state.open(SeatOpening(0, wish, 0, (1,)))
    assert state.output_counts.sum() == 0
    assert state.prompt_mask[0].nonzero().flatten().tolist() == [1]


def test_min_tokens_masks_stopping_tokens_until_enough_are_out() -> None:
    wish = params(temperature=0.0, min_tokens=2, eos_token_ids=(3, 99), stop_token_ids=(4,))
    logits = torch.tensor([[0.0, 0, 1, 9, 8, 0, 0, 0, 0, 0, 0]])
    state = opened((0, wish))
    assert sample(state, logits, [0], position=2) == [2]
    assert sample(state, logits, [0], position=3) == [2]
    assert sample(state, logits, [0], position=4) == [3]


def test_logit_bias_moves_the_choice_of_its_own_row_only() -> None:
    state = opened(
        (0, params(temperature=0.0, logit_bias=((6, 100.0), (2, -5.0)))),
        (1, params(temperature=0.0)),
    )
    logits = torch.zeros(2, 11)
    logits[:, 2] = 1.0
    assert sample(state, logits, [0, 1]) == [6, 2]
    assert logits.sum() == 2.0


def test_a_grammar_mask_allows_only_its_bits() -> None:
    state = opened((0, params(seed=3)), (1, params(temperature=0.0)))
    mask = bytes([0b0010_0000, 0b0000_0001])
    logits = torch.zeros(2, 11)
    logits[1, 2] = 1.0
    drawn = {
        tuple(Sampler(state).sample(logits, [0, 1], [p, p], {0: mask}).tolist()) for p in range(40)
    }
    assert drawn == {(5, 2), (8, 2)}


def test_a_mask_that_allows_nothing_gives_minus_one() -> None:
    state = opened((0, params()), (1, params(temperature=0.0)))
    found = Sampler(state).sample(torch.zeros(2, 11), [0, 1], [2, 2], {0: bytes(2), 1: bytes(2)})
    assert found.tolist() == [-1, -1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_minus_one_and_leaves_others_alone(bad: float) -> None:
    state = opened((0, params()), (1, params(temperature=0.0)), (2, params(temperature=0.0)))
    logits = torch.zeros(3, 11)
    logits[0, 4] = logits[1, 4] = bad
    logits[2, 9] = 1.0
    assert sample(state, logits, [0, 1, 2]) == [-1, -1, 9]
    assert state.last_token[:3].tolist() == [0, 0, 9]


def test_log_probabilities_are_those_of_the_model_itself() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, 5.0]])
    expected = torch.log_softmax(logits, 1)
    rows = rank_tokens(logits, torch.tensor([0, 2]), top=2).rows([0, 2], [2, 0])
    assert rows[0].logprob == pytest.approx(float(expected[0, 0]))
    assert [token for token, _ in rows[0].top] == [1, 2]
    assert rows[0].top[0][1] == pytest.approx(float(expected[0, 1]))
    assert rows[1].top == ()
