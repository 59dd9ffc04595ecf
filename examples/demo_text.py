"""How the demo shows streams that arrive interleaved, and the table of what they cost."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

from loraplex.engine.v1 import engine_pb2

_COLOURS = ("36", "33", "35", "32", "34", "31")
#: a stream's text is printed in pieces of about this many characters, at a word's end
_PIECE = 60


class Printer:
    """Prints pieces of several streams line by line, each with the name of its stream."""

    def __init__(self, names: Sequence[str]) -> None:
        self._width = max(map(len, names))
        self._colour = dict(zip(names, _COLOURS, strict=False))
        self._pending = dict.fromkeys(names, "")
        self._lock = threading.Lock()
        self._tty = sys.stdout.isatty() and "NO_COLOR" not in os.environ

    def title(self, name: str, prompt: str) -> None:
        with self._lock:
            self._line(name, f"▶ {prompt}")

    def text(self, name: str, text: str) -> None:
        with self._lock:
            pending = self._pending[name] + text
            while "\n" in pending or len(pending) >= _PIECE:
                piece, pending = _split(pending)
                if piece.strip():
                    self._line(name, piece)
            self._pending[name] = pending

    def end(self, name: str) -> None:
        with self._lock:
            if self._pending[name].strip():
                self._line(name, self._pending[name])
            self._pending[name] = ""

    def _line(self, name: str, text: str) -> None:
        label = name.ljust(self._width)
        if self._tty:
            label = f"\x1b[{self._colour.get(name, '37')}m{label}\x1b[0m"
        print(f"{label} │ {text.rstrip()}", flush=True)


def _split(pending: str) -> tuple[str, str]:
    """The first piece to print, and the rest; cut at a newline, or before the last space."""
    line, newline, rest = pending.partition("\n")
    if newline and len(line) < _PIECE:
        return line, rest
    space = pending.rfind(" ", 1, _PIECE)
    cut = space if space > 0 else _PIECE
    return pending[:cut], pending[cut:].lstrip(" ")


def table(rows: Sequence[tuple[str, Sequence[engine_pb2.Summary]]]) -> str:
    """One line a model: sums over its requests, means of TTFT and TPOT; times in milliseconds."""
    header = (
        "model", "version", "digest", "requests", "tokens", "place", "load", "kv", "budget",
        "paused", "loaded in", "TTFT", "TPOT",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = [header]
    for model, summaries in rows:
        last = summaries[-1]
        count = len(summaries)
        lines.append(
            (
                model,
                f"v{last.adapter.version}" if last.adapter.version else "base",
                last.adapter.digest[:17] or "–",
                str(count),
                str(sum(one.usage.completion_tokens for one in summaries)),
                *(
                    _ms(sum(getattr(one, f"wait_{cause}_s") for one in summaries))
                    for cause in ("place", "load", "kv", "budget")
                ),
                _ms(sum(one.paused_s for one in summaries)),
                _ms(last.load_s),
                _ms(sum(one.ttft_s for one in summaries) / count),
                _ms(sum(one.tpot_s for one in summaries) / count),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(1, "  ".join("─" * width for width in widths))
    title = "Per model, in ms: waits by cause (place, load, kv, budget), pauses, TTFT, TPOT"
    return "\n".join((title, *text))


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}"
