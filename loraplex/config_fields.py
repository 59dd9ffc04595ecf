"""Numbers out of a `config.json`: read with a range, refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loraplex.status import BaseModelUnsupported

MAX_SIZE = 1 << 24


def size_field(
    config: Mapping[str, Any], key: str, default: int | None = None, *, limit: int = MAX_SIZE
) -> int:
    """A whole number in 1 … limit. Raises: BaseModelUnsupported."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise BaseModelUnsupported(key, value, f"a whole number in 1 … {limit}")
    return value


def number_field(table: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """A finite number. Raises: BaseModelUnsupported."""
    value = table.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BaseModelUnsupported(key, value, "a number")
    return float(value)
