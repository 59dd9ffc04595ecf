"""One case per limit of protos/loraplex/engine/v1/engine.proto."""

import math
from typing import Any

import pytest

from engine_svc.frontend.sampling import ResolvedSampling, resolve_sampling
from engine_svc.types import SamplingParams
from loraplex.engine.v1 import engine_pb2
from loraplex.status import InvalidArgument, SamplingInvalid, Unimplemented


def resolve(num_prompt_tokens: int = 10, **fields: Any) -> ResolvedSampling:
    return resolve_sampling(
        engine_pb2.SamplingParams(**fields),
        num_prompt_tokens=num_prompt_tokens,
        context_tokens=100,
        vocab_size=1000,
        eos_token_ids=(2, 3),
    )


def test_unset_fields_get_their_documented_values() -> None:
    resolved = resolve()
    assert resolved.stops == ()
    assert resolved.sampling == SamplingParams(
        max_tokens=90,
        seed=resolved.sampling.seed,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        n=1,
        min_tokens=0,
        eos_token_ids=(2, 3),
        stop_token_ids=(),
        logprobs=None,
        prompt_logprobs=None,
        logit_bias=(),
    )


REFUSED: list[tuple[str, Any, str]] = [
    ("temperature", -0.5, "in [0, 100]"),
    ("temperature", 101.0, "in [0, 100]"),
    ("temperature", math.nan, "in [0, 100]"),
    ("temperature", math.inf, "in [0, 100]"),
    ("top_p", 0.0, "in (0, 1]"),
    ("top_p", 1.5, "in (0, 1]"),
    ("top_p", math.nan, "in (0, 1]"),
    ("top_k", -1, "at least 0"),
    ("min_p", -0.25, "in [0, 1]"),
    ("min_p", 1.25, "in [0, 1]"),
    ("min_p", math.nan, "in [0, 1]"),
    ("repetition_penalty", 0.0, "in (0, 10]"),
    ("repetition_penalty", 10.5, "in (0, 10]"),
    ("repetition_penalty", math.nan, "in (0, 10]"),
    ("presence_penalty", -2.5, "in [-2, 2]"),
    ("presence_penalty", 2.5, "in [-2, 2]"),
    ("presence_penalty", math.nan, "in [-2, 2]"),
    ("frequency_penalty", -2.5, "in [-2, 2]"),
    ("frequency_penalty", 2.5, "in [-2, 2]"),
    ("frequency_penalty", math.nan, "in [-2, 2]"),
    ("n", 0, "in 1 … 64"),
    ("n", -1, "in 1 … 64"),
    ("n", 65, "in 1 … 64"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", -5, "at least 1"),
    ("min_tokens", -1, "at least 0"),
    ("min_tokens", 91, "at most max_tokens (90)"),
    ("logprobs", -1, "in 0 … 20"),
    ("logprobs", 21, "in 0 … 20"),
    ("prompt_logprobs", -1, "in 0 … 20"),
    ("prompt_logprobs", 21, "in 0 … 20"),
    ("stop_token_ids", [1000], "token ids in 0 … 999"),
    ("stop_token_ids", [-1], "token ids in 0 … 999"),
    ("logit_bias", {1000: 1.0}, "token ids in 0 … 999"),
    ("logit_bias", {-1: 1.0}, "token ids in 0 … 999"),
]


@pytest.mark.parametrize(("field", "value", "limit"), REFUSED)
def test_a_value_outside_its_limit_is_refused_by_name(field: str, value: Any, limit: str) -> None:
    with pytest.raises(SamplingInvalid) as caught:
        resolve(**{field: value})
    shown = next(iter(value)) if isinstance(value, list | dict) else value
    assert caught.value.reason == "SAMPLING_INVALID"
    assert caught.value.metadata == {
        "field": f"sampling.{field}",
        "value": repr(shown),
        "limit": limit,
    }


REFUSED_INSIDE: list[tuple[str, Any, str, str]] = [
    ("logit_bias", {5: 100.5}, "sampling.logit_bias[5]", "in [-100, 100]"),
    ("logit_bias", {5: math.nan}, "sampling.logit_bias[5]", "in [-100, 100]"),
    ("logit_bias", {5: -math.inf}, "sampling.logit_bias[5]", "in [-100, 100]"),
    ("stop", ["a", ""], "sampling.stop[1]", "1 … 256 characters"),
    ("stop", ["x" * 257], "sampling.stop[0]", "1 … 256 characters"),
    ("stop", [str(index) for index in range(17)], "sampling.stop", "at most 16 strings"),
]


@pytest.mark.parametrize(("field", "value", "named", "limit"), REFUSED_INSIDE)
def test_a_bad_entry_is_named(field: str, value: Any, named: str, limit: str) -> None:
    with pytest.raises(SamplingInvalid) as caught:
        resolve(**{field: value})
    assert caught.value.metadata["field"] == named
    assert caught.value.metadata["limit"] == limit


def test_more_stop_ids_than_the_vocabulary_has_are_refused() -> None:
    with pytest.raises(SamplingInvalid, match=r"1001; must be at most 1000 ids"):
        resolve(stop_token_ids=[5] * 1001)


def test_too_many_biases_are_refused() -> None:
    with pytest.raises(SamplingInvalid, match=r"1025; must be at most 1024 entries"):
        resolve_sampling(
            engine_pb2.SamplingParams(logit_bias={index: 0.0 for index in range(1025)}),
            num_prompt_tokens=1,
            context_tokens=100,
            vocab_size=2000,
            eos_token_ids=(),
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 100.0), ("top_p", 1.0), ("top_p", 0.25), ("top_k", 2**31 - 1),
        ("min_p", 0.0), ("min_p", 1.0), ("repetition_penalty", 10.0), ("presence_penalty", -2.0),
        ("presence_penalty", 2.0), ("frequency_penalty", 2.0), ("n", 64), ("max_tokens", 1),
        ("max_tokens", 90), ("min_tokens", 90), ("logprobs", 0), ("logprobs", 20),
        ("prompt_logprobs", 20), ("seed", 0), ("seed", 2**64 - 1),
    ],
)  # fmt: skip
def test_values_at_their_limits_pass_unchanged(field: str, value: Any) -> None:
    assert getattr(resolve(**{field: value}).sampling, field) == value


def test_collections_at_their_limits_pass() -> None:
    resolved = resolve(
        stop=["x" * 256, "é", "x" * 256],
        stop_token_ids=[999, 0, 999],
        logit_bias={999: 100.0, 0: -100.0},
    )
    assert resolved.stops == ("x" * 256, "é")
    assert resolved.sampling.stop_token_ids == (999, 0)
    assert resolved.sampling.logit_bias == ((0, -100.0), (999, 100.0))


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 9e-6])
def test_a_temperature_of_almost_zero_is_greedy(temperature: float) -> None:
    assert resolve(temperature=temperature).sampling.temperature == 0.0


def test_max_tokens_ends_where_the_context_does() -> None:
    sampling = resolve(max_tokens=10**6, min_tokens=10**5).sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (90, 90)


def test_ignore_eos_leaves_no_end_token() -> None:
    assert resolve(ignore_eos=True).sampling.eos_token_ids == ()


def test_seeds_are_drawn_anew() -> None:
    assert resolve().sampling.seed != resolve().sampling.seed


@pytest.mark.parametrize("field", ["gbnf", "json_schema"])
def test_a_grammar_is_refused_by_name(field: str) -> None:
    with pytest.raises(Unimplemented, match=f"sampling.{field}") as caught:
        resolve(**{field: ""})
    assert caught.value.reason == "NOT_SUPPORTED"
    assert caught.value.metadata == {"field": f"sampling.{field}"}


@pytest.mark.parametrize("num_tokens", [100, 101, 10**6])
def test_a_prompt_that_fills_the_context_is_too_long(num_tokens: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve(num_tokens)
    assert caught.value.reason == "PROMPT_TOO_LONG"
    assert caught.value.metadata == {"prompt_tokens": str(num_tokens), "limit": "99"}


def test_the_longest_prompt_leaves_one_token() -> None:
    assert resolve(99).sampling.max_tokens == 1


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve(0)
    assert caught.value.reason == "PROMPT_EMPTY"
