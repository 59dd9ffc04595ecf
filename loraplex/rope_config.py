"""What a `config.json` says of rotary positions, in the style of transformers 4 or 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loraplex.config_fields import number_field, size_field
from loraplex.status import BaseModelUnsupported

#: rope type → the numbers that its table must hold. `dynamic` is not among them: its angles change
#: when a sequence grows, which no paged cache of turned keys can follow. Neither can it where
#: `longrope` changes, so that one is served within the original context.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
#: fields of a rope type that are read where they are given, all above 0
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow"),
}
#: what Phi-3 has called it
_LONGROPE_NAMES = ("longrope", "su", "yarn")
_NAMES = frozenset({"rope_type", "type", "partial_rotary_factor"})


def rope_table(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table as written, {} when there is none."""
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
        raise BaseModelUnsupported("rope_parameters", table, "one table for all layers")
    return table


def read_rope(
    config: Mapping[str, Any], default_theta: float = 10000.0
) -> tuple[float, Mapping[str, Any]]:
    """Base frequency, and the scaling table, {} for plain rotary positions.

    Raises: BaseModelUnsupported: a rope type or a field of it that is not understood.
    """
    table = rope_table(config)
    theta = number_field(table if table.get("rope_theta") else config, "rope_theta", default_theta)
    scaling = {key: value for key, value in table.items() if key not in ("rope_theta", "truncate")}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, {}
    if kind in _LONGROPE_NAMES and "short_factor" in scaling:
        return theta, _longrope(config, scaling)
    if not isinstance(kind, str) or kind not in _NUMBERS:
        limit = ", ".join(["default", "longrope with a short_factor", *_NUMBERS])
        raise BaseModelUnsupported("rope_type", kind, limit)
    for key in _NUMBERS[kind]:
        if number_field(scaling, key) <= 0:
            raise BaseModelUnsupported(key, scaling[key], "a number above 0")
    for key in _OPTIONAL.get(kind, ()):
        if scaling.get(key) is not None and number_field(scaling, key) <= 0:
            raise BaseModelUnsupported(key, scaling[key], "a number above 0")
    if table.get("truncate") is False:
        raise BaseModelUnsupported("truncate", False, "true")
    known = _NAMES | set(_NUMBERS[kind]) | set(_OPTIONAL.get(kind, ()))
    for key, value in scaling.items():
        if kind == "yarn" and key not in known and value:
            raise BaseModelUnsupported(key, value, f"absent; {kind} is served without it")
    return theta, scaling


def _longrope(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the table that counts within the original context, defaults filled in."""
    short = scaling["short_factor"]
    if not isinstance(short, list) or not all(
        isinstance(number, int | float) and not isinstance(number, bool) and number > 0
        for number in short
    ):
        raise BaseModelUnsupported("short_factor", short, "a list of numbers above 0")
    place = config if config.get("original_max_position_embeddings") is not None else scaling
    original = size_field(place, "original_max_position_embeddings")
    longest = size_field(config, "max_position_embeddings")
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "original_max_position_embeddings": original,
        "factor": number_field(scaling, "factor", longest / original),
        "attention_factor": scaling.get("attention_factor")
        and number_field(scaling, "attention_factor"),
    }


def rotary_share(config: Mapping[str, Any]) -> float:
    """The part of each head that is turned, in 0 … 1."""
    table = rope_table(config)
    place = table if table.get("partial_rotary_factor") is not None else config
    share = number_field(place, "partial_rotary_factor", 1.0)
    if not 0 < share <= 1:
        raise BaseModelUnsupported("partial_rotary_factor", share, "above 0, at most 1")
    return share
