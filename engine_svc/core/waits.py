"""Why something waits: each second between received and first planned has exactly one cause.

All that wait for one adapter wait for the same thing, so the clock runs per adapter: a request
reads it when it arrives and when it is first planned, and the difference is its wait. Nothing is
done per request and step.
"""

from __future__ import annotations

import enum
from operator import sub

from engine_svc.types import Waits


class Cause(enum.IntEnum):
    """What the next sequence of an adapter lacks."""

    PLACE = 0
    LOAD = 1
    #: arena pages for the adapter itself
    BYTES = 2
    #: arena pages for KV
    PAGES = 3
    SEAT = 4
    #: the next step, or tokens in it
    BUDGET = 5


Reading = tuple[float, ...]


class WaitClock:
    """Seconds since its creation, split by the cause that was current."""

    def __init__(self, cause: Cause, now: float) -> None:
        self.cause = cause
        self._since_s = now
        self._totals = [0.0] * len(Cause)

    def turn(self, cause: Cause, now: float) -> None:
        """From now on the time goes to `cause`."""
        if cause is not self.cause:
            self._totals[self.cause] += now - self._since_s
            self.cause, self._since_s = cause, now

    def read(self, now: float) -> Reading:
        totals = list(self._totals)
        totals[self.cause] += now - self._since_s
        return tuple(totals)


def waits_between(start: Reading, end: Reading, before_s: float) -> Waits:
    """The wait between two readings. `before_s`, received → handed to the core, counts as budget:
    the core was busy with a step."""
    place, load, weights, pages, seat, budget = map(sub, end, start)
    return Waits(place, load, weights + pages, seat + budget + before_s)
