"""Rows as an aligned table of text."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns two spaces apart; columns of numbers are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [
        max([len(title), *(len(row[index]) for row in cells)]) for index, title in enumerate(header)
    ]
    numeric = [
        bool(rows) and all(isinstance(row[index], (int, float)) for row in rows)
        for index in range(len(header))
    ]

    def line(row: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join([line(header), *(line(row) for row in cells)])


def size(num_bytes: int) -> str:
    """Bytes in the unit that reads best."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
