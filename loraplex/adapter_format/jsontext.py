"""JSON that strangers wrote: bounded, an object at the top, no key twice, no NaN."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from loraplex.status import AdapterRefused


def parse_object(data: bytes, what: str, reason: str) -> dict[str, Any]:
    """The JSON object that `data` holds.

    Raises: AdapterRefused with `reason` when it is not UTF-8 JSON, nests too deeply, repeats a key
    or is no object.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except RecursionError as error:
        raise AdapterRefused(f"{what}: nested too deeply", reason=reason) from error
    except ValueError as error:
        raise AdapterRefused(f"{what}: {str(error)[:200]}", reason=reason) from error
    if not isinstance(value, dict):
        raise AdapterRefused(f"{what}: holds no JSON object", reason=reason)
    return value


def canonical_json(value: object) -> bytes:
    """The one text of a value: UTF-8, sorted keys, no spaces, no NaN."""
    text = json.dumps(
        value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return text.encode("utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key[:100]!r} occurs twice")
            seen.add(key)
    return table


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
