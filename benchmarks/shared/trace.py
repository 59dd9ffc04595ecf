"""When which adapter is asked for how much: a user's own trace, or a workload that papers use.

A trace is JSONL, one request a line:

    {"time": 0.25, "adapter": "sql-lora", "prompt_tokens": 120, "output_tokens": 64}

`time` counts seconds from the start; `adapter` "" is the base model.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

MAX_LINES = 1_000_000
MAX_TIME_S = 7 * 86400.0
MAX_NAME = 128
FIELDS = ("time", "adapter", "prompt_tokens", "output_tokens")
POPULARITIES = ("distinct", "uniform", "zipf", "identical")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    time: float
    adapter: str
    prompt_tokens: int
    output_tokens: int


class TraceInvalid(ValueError):
    """The message names file, line, field, value and limit."""


def read_trace(path: Path, context_tokens: int) -> tuple[TraceRequest, ...]:
    """The requests of a file in the order of their times.

    Args: context_tokens, most prompt and output tokens together.
    Raises: TraceInvalid: the first line that is not as above; OSError.
    """
    found = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if number > MAX_LINES:
                raise TraceInvalid(f"{path.name}: over {MAX_LINES} lines")
            if line.strip():
                found.append(_request(line, f"{path.name} line {number}", context_tokens))
    if not found:
        raise TraceInvalid(f"{path.name}: no request in it")
    return tuple(sorted(found, key=lambda request: request.time))


def write_trace(path: Path, requests: Iterable[TraceRequest]) -> None:
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in requests))


def slora(
    adapters: Sequence[str], per_s: float, seconds: float, seed: int, low: int = 8, high: int = 512
) -> tuple[TraceRequest, ...]:
    """Poisson arrivals, popularity 1/rank in the order of `adapters`, prompt and output uniform low
    … high tokens.

    Source: S-LoRA (Sheng et al., 2023), §7, synthetic workloads.
    """
    rng = random.Random(seed)
    shares = list(accumulate(1 / rank for rank in range(1, len(adapters) + 1)))
    return tuple(
        TraceRequest(
            due_s, _drawn(adapters, shares, rng), rng.randint(low, high), rng.randint(low, high)
        )
        for due_s in _poisson(per_s, seconds, rng)
    )


def punica(
    adapters: Sequence[str],
    popularity: str,
    per_s: float,
    seconds: float,
    seed: int,
    context_tokens: int = 2048,
) -> tuple[TraceRequest, ...]:
    """Poisson arrivals; prompts log-normal (shape 0.8, location −1, scale 18), prompt and output
    together uniform up to the context.

    Args: popularity, one of POPULARITIES: every request another adapter (in turn), each of √n
    equally often, Zipf of exponent 1.5, one for all; n is the number of requests, at most as many
    adapters as given.
    Source: Punica (Chen et al., 2023), §7.
    """
    if popularity not in POPULARITIES:
        raise ValueError(f"popularity is {popularity!r}; must be one of {', '.join(POPULARITIES)}")
    rng = random.Random(seed)
    times = _poisson(per_s, seconds, rng)
    root = max(1, math.isqrt(len(times)))
    count = {"identical": 1, "uniform": root}.get(popularity, len(adapters))
    used = adapters[:count]
    exponent = 1.5 if popularity == "zipf" else 0.0
    shares = list(accumulate(rank**-exponent for rank in range(1, len(used) + 1)))
    found = []
    for number, due_s in enumerate(times):
        name = used[number % len(used)]
        if popularity in ("uniform", "zipf"):
            name = _drawn(used, shares, rng)
        prompt = min(max(1, round(18 * math.exp(rng.gauss(0, 0.8)) - 1)), context_tokens - 1)
        total = rng.randint(2, context_tokens)
        found.append(TraceRequest(due_s, name, prompt, max(1, total - prompt)))
    return tuple(found)


def _poisson(per_s: float, seconds: float, rng: random.Random) -> list[float]:
    times: list[float] = []
    due_s = rng.expovariate(per_s)
    while due_s < seconds:
        times.append(due_s)
        due_s += rng.expovariate(per_s)
    return times


def _drawn(names: Sequence[str], shares: Sequence[float], rng: random.Random) -> str:
    return names[bisect_left(shares, rng.random() * shares[-1])]


def _request(line: str, where: str, context_tokens: int) -> TraceRequest:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceInvalid(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceInvalid(f"{where}: must be a JSON object")
    for name in fields:
        if name not in FIELDS:
            raise TraceInvalid(
                f"{where}: field {name!r} is unknown; fields are {', '.join(FIELDS)}"
            )
    for name in FIELDS:
        if name not in fields:
            raise TraceInvalid(f"{where}: field {name!r} is missing")
    time, adapter = fields["time"], fields["adapter"]
    if not _is_number(time) or not 0 <= time <= MAX_TIME_S:
        raise _refused(where, "time", time, f"seconds from 0 to {MAX_TIME_S:g}")
    if not isinstance(adapter, str) or len(adapter) > MAX_NAME:
        raise _refused(where, "adapter", adapter, f"text of at most {MAX_NAME} characters")
    for name in FIELDS[2:]:
        value = fields[name]
        if type(value) is not int or not 1 <= value < context_tokens:
            raise _refused(where, name, value, f"a whole number from 1 to {context_tokens - 1}")
    prompt, output = fields["prompt_tokens"], fields["output_tokens"]
    if prompt + output > context_tokens:
        limit = f"at most {context_tokens} (--context-tokens)"
        raise _refused(where, "prompt_tokens + output_tokens", prompt + output, limit)
    return TraceRequest(float(time), adapter, prompt, output)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _refused(where: str, field: str, value: object, limit: str) -> TraceInvalid:
    return TraceInvalid(f"{where}: {field} is {value!r:.60}; must be {limit}")
