"""How refusals of an adapter are worded."""

from __future__ import annotations

from loraplex.adapter_format.spec import BaseModelFacts
from loraplex.status import AdapterRefused

_SHOWN = 3


def refused(reason: str, what: str, problem: str) -> AdapterRefused:
    return AdapterRefused(
        f"{what}: {problem}",
        reason=reason,
        metadata={"field": what, "value": what, "limit": problem},
    )


def mismatch(base: BaseModelFacts, what: str, value: int, limit: int | str) -> AdapterRefused:
    """A size that only another base model has."""
    return AdapterRefused(
        f"{what} is {value}, {base.name} has {limit}: trained on another base model",
        reason="BASE_MODEL_MISMATCH",
        metadata={"field": what, "value": str(value), "limit": str(limit)},
    )


def few(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN])[:600] + (f" and {more} more" if more > 0 else "")
