"""Finds stop strings in streamed text, across the borders of tokens.

Text goes out at once, except for an ending that can still become a match. The match that ends
first wins; of those that end together, the longest. The result does not depend on how the text
was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """`text` is what goes out, the last before the match; `stop` is None while nothing matched."""

    text: str
    stop: str | None = None


class StopMatcher:
    """State of one choice. After a match it must not be fed again."""

    __slots__ = ("_held", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> StopMatch:
        """Take the next text. Not `armed`: a match that ends in this text does not count."""
        if not self._stops or not text:
            return StopMatch(text)
        buffer = self._held + text
        if armed:
            found = min(self._matches(buffer), default=None)
            if found is not None:
                _, start, stop = found
                return StopMatch(buffer[:start], stop)
        keep = max(_open_ending(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return StopMatch(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """What was held back, when the choice ends without a match."""
        held, self._held = self._held, ""
        return held

    def _matches(self, buffer: str) -> Iterator[tuple[int, int, str]]:
        """(end, start, stop) of each stop's first match that ends in the new text."""
        for stop in self._stops:
            start = buffer.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if start >= 0:
                yield start + len(stop), start, stop


def _open_ending(text: str, stop: str) -> int:
    """Length of the longest ending of `text` that is a proper beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
