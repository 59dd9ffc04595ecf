"""`SamplingParams` of the proto → the engine's: every limit checked, nothing left unset.

The limits are those in the comments of protos/loraplex/engine/v1/engine.proto.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_svc.types import SamplingParams
from loraplex.engine.v1 import engine_pb2
from loraplex.status import InvalidArgument, SamplingInvalid, Unimplemented

MAX_TEMPERATURE = 100.0
MAX_CHOICES = 64
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_BIASES = 1024
#: Below this, fp32 softmax puts all weight on the largest logit: the same as greedy, and finite.
_GREEDY_BELOW = 1e-5
_DRAWN_SEED_BITS = 53


@dataclass(frozen=True, slots=True)
class ResolvedSampling:
    """`sampling` goes to the core; stop strings stay in the frontend."""

    sampling: SamplingParams
    stops: tuple[str, ...]


def resolve_sampling(
    params: engine_pb2.SamplingParams,
    *,
    num_prompt_tokens: int,
    context_tokens: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> ResolvedSampling:
    """Check all fields and fill in what is unset; an unset seed is drawn.

    Raises: SamplingInvalid, InvalidArgument PROMPT_EMPTY or PROMPT_TOO_LONG, Unimplemented for a
    grammar.
    """
    _refuse_grammar(params)
    room = room_for_answer(num_prompt_tokens, context_tokens)
    max_tokens = _whole(params, "max_tokens", room, 1)
    sampling = SamplingParams(
        max_tokens=min(max_tokens, room),
        seed=params.seed if params.HasField("seed") else secrets.randbits(_DRAWN_SEED_BITS),
        temperature=_temperature(params),
        top_p=_number(params, "top_p", 1.0, 0.0, 1.0, open_low=True),
        top_k=_whole(params, "top_k", 0, 0),
        min_p=_number(params, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_number(params, "repetition_penalty", 1.0, 0.0, 10.0, open_low=True),
        presence_penalty=_number(params, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(params, "frequency_penalty", 0.0, -2.0, 2.0),
        n=_whole(params, "n", 1, 1, MAX_CHOICES),
        min_tokens=_min_tokens(params, max_tokens, room),
        eos_token_ids=() if params.ignore_eos else eos_token_ids,
        stop_token_ids=_stop_token_ids(params, vocab_size),
        logprobs=_optional_whole(params, "logprobs", MAX_LOGPROBS),
        prompt_logprobs=_optional_whole(params, "prompt_logprobs", MAX_LOGPROBS),
        logit_bias=_logit_bias(params, vocab_size),
    )
    return ResolvedSampling(sampling, _stops(params.stop))


def _refuse_grammar(params: engine_pb2.SamplingParams) -> None:
    kind = params.WhichOneof("grammar")
    if kind is not None:
        raise Unimplemented(
            f"sampling.{kind}: this build does not serve grammars; leave the field unset",
            metadata={"field": f"sampling.{kind}"},
        )


def room_for_answer(num_prompt_tokens: int, context_tokens: int) -> int:
    """Tokens that the context leaves. Raises: InvalidArgument PROMPT_EMPTY, PROMPT_TOO_LONG."""
    if num_prompt_tokens == 0:
        raise InvalidArgument(
            "the prompt has no token; send at least one",
            reason="PROMPT_EMPTY",
            metadata={"field": "prompt", "value": "0 tokens", "limit": "at least 1 token"},
        )
    limit = context_tokens - 1
    if num_prompt_tokens > limit:
        raise InvalidArgument(
            f"the prompt has {num_prompt_tokens} tokens; at most {limit} leave room for an answer"
            f" in the context of {context_tokens}",
            reason="PROMPT_TOO_LONG",
            metadata={"prompt_tokens": str(num_prompt_tokens), "limit": str(limit)},
        )
    return context_tokens - num_prompt_tokens


def _number(
    params: engine_pb2.SamplingParams,
    name: str,
    default: float,
    low: float,
    high: float,
    *,
    open_low: bool = False,
) -> float:
    if not params.HasField(name):  # type: ignore[arg-type]  # one of the proto's own names
        return default
    value = float(getattr(params, name))
    is_above = value > low if open_low else value >= low
    if not (math.isfinite(value) and is_above and value <= high):
        bracket = "(" if open_low else "["
        raise SamplingInvalid(f"sampling.{name}", value, f"in {bracket}{low:g}, {high:g}]")
    return value


def _temperature(params: engine_pb2.SamplingParams) -> float:
    value = _number(params, "temperature", 1.0, 0.0, MAX_TEMPERATURE)
    return value if value >= _GREEDY_BELOW else 0.0


def _whole(
    params: engine_pb2.SamplingParams, name: str, default: int, low: int, high: int | None = None
) -> int:
    if not params.HasField(name):  # type: ignore[arg-type]  # one of the proto's own names
        return default
    value = int(getattr(params, name))
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low} … {high}"
        raise SamplingInvalid(f"sampling.{name}", value, limit)
    return value


def _optional_whole(params: engine_pb2.SamplingParams, name: str, high: int) -> int | None:
    value = _whole(params, name, -1, 0, high)
    return None if value < 0 else value


def _min_tokens(params: engine_pb2.SamplingParams, max_tokens: int, room: int) -> int:
    value = _whole(params, "min_tokens", 0, 0)
    if value > max_tokens:
        raise SamplingInvalid("sampling.min_tokens", value, f"at most max_tokens ({max_tokens})")
    return min(value, room)


def _stop_token_ids(params: engine_pb2.SamplingParams, vocab_size: int) -> tuple[int, ...]:
    field, ids = "sampling.stop_token_ids", params.stop_token_ids
    if len(ids) > vocab_size:
        raise SamplingInvalid(field, len(ids), f"at most {vocab_size} ids, the vocabulary's size")
    _check_ids(field, ids, vocab_size)
    return tuple(dict.fromkeys(params.stop_token_ids))


def _logit_bias(
    params: engine_pb2.SamplingParams, vocab_size: int
) -> tuple[tuple[int, float], ...]:
    field = "sampling.logit_bias"
    if len(params.logit_bias) > MAX_BIASES:
        raise SamplingInvalid(field, len(params.logit_bias), f"at most {MAX_BIASES} entries")
    _check_ids(field, params.logit_bias, vocab_size)
    for token_id, bias in params.logit_bias.items():
        if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
            raise SamplingInvalid(f"{field}[{token_id}]", bias, "in [-100, 100]")
    return tuple(sorted(params.logit_bias.items()))


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise SamplingInvalid(field, token_id, f"token ids in 0 … {vocab_size - 1}")


def _stops(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        raise SamplingInvalid("sampling.stop", len(stops), f"at most {MAX_STOPS} strings")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            limit = f"1 … {MAX_STOP_CHARACTERS} characters"
            raise SamplingInvalid(f"sampling.stop[{index}]", stop, limit)
    return tuple(dict.fromkeys(stops))
