"""Polling with a deadline, instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(ask: Callable[[], T], timeout_s: float = 10.0, every_s: float = 0.01) -> T:
    """The first true answer of `ask`; fails when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"no true answer within {timeout_s} s; last: {answer!r}"
        time.sleep(every_s)
