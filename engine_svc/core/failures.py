"""The failures that the core itself gives to a request, as plain values."""

from __future__ import annotations

from engine_svc.types import AdapterRef, Failure


def queue_full(queued: int, limit: int, retry_after_s: float) -> Failure:
    return Failure(
        "RESOURCE_EXHAUSTED",
        "QUEUE_FULL",
        f"{queued} requests wait for their first step, the limit is {limit}; "
        f"retry in {retry_after_s:.1f} s",
        (("queued", str(queued)), ("limit", str(limit))),
        retry_after_s,
    )


def draining() -> Failure:
    return Failure(
        "UNAVAILABLE", "DRAINING", "the engine is shutting down; use another one", (), 1.0
    )


def prompt_empty() -> Failure:
    return Failure("INVALID_ARGUMENT", "PROMPT_EMPTY", "the prompt has no token")


def prompt_too_long(tokens: int, limit: int, because: str) -> Failure:
    return Failure(
        "INVALID_ARGUMENT",
        "PROMPT_TOO_LONG",
        f"the prompt has {tokens} tokens, the limit is {limit}: {because}",
        (("prompt_tokens", str(tokens)), ("limit", str(limit))),
    )


def too_many_choices(n: int, limit: int) -> Failure:
    return Failure(
        "INVALID_ARGUMENT",
        "SAMPLING_INVALID",
        f"sampling.n is {n}; must be at most {limit}, the engine's max_num_seqs",
        (("field", "sampling.n"), ("value", str(n)), ("limit", f"at most {limit}")),
    )


def adapter_too_large(ref: AdapterRef, pages: int, limit: int) -> Failure:
    return Failure(
        "FAILED_PRECONDITION",
        "ADAPTER_TOO_LARGE",
        f"adapter {ref.name}@{ref.version} takes {pages} arena pages; an empty arena has {limit} "
        "beside one page of KV: raise --arena-bytes or publish it with a lower rank",
        (("adapter", ref.name), ("pages", str(pages)), ("limit", str(limit))),
    )


def deadline_exceeded(request_id: str) -> Failure:
    return Failure(
        "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", f"request {request_id} passed its deadline"
    )


def cancelled(request_id: str) -> Failure:
    return Failure("CANCELLED", "CANCELLED", f"request {request_id} was cancelled by its caller")


def not_finite(request_id: str, ref: AdapterRef | None) -> Failure:
    """The adapter's fault where there is one: its values are finite, its output is not."""
    rest = f"produced non-finite logits in request {request_id}; other requests are not affected"
    if ref is None:
        return Failure("INTERNAL", "INVARIANT", f"the base model {rest}")
    return Failure(
        "FAILED_PRECONDITION",
        "WEIGHTS_NOT_FINITE",
        f"adapter {ref.name}@{ref.version} ({ref.digest}) {rest}; publish a version with sound "
        "weights",
        (("adapter", ref.name), ("digest", ref.digest)),
    )
