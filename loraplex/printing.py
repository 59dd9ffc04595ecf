"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def to_plain(message: Message) -> dict[str, Any]:
    """A message as JSON values, unset fields included."""
    plain: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return plain


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, sort_keys=True))


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    for row, values in ((headers, [""] * len(headers)), *zip(cells, rows, strict=True)):
        parts = [
            text.rjust(width) if isinstance(value, int | float) else text.ljust(width)
            for text, width, value in zip(row, widths, values, strict=True)
        ]
        print("  ".join(parts).rstrip())


def print_fields(fields: Mapping[str, object]) -> None:
    """One `name  value` line each; empty ones are left out."""
    shown = {name: _cell(value) for name, value in fields.items() if _cell(value)}
    width = max(map(len, shown), default=0)
    for name, text in shown.items():
        print(f"{name.ljust(width)}  {text}")


def size(num_bytes: int) -> str:
    """Bytes in the unit that reads best."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"


def short(digest: str) -> str:
    """`sha256:` and 12 digits."""
    return digest[:19]


def enum_name(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
