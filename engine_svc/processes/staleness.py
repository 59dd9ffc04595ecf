"""How long names may be served that no registry confirms."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Staleness:
    """Tells True once the registry has been silent for `limit_s`, and False when it is back.

    `limit_s` 0: never. `tell` is called from the timer's thread or the caller's, never at once.
    """

    def __init__(
        self,
        limit_s: float,
        tell: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._tell, self._clock = limit_s, tell, clock
        self._timer: threading.Timer | None = None
        self._is_stale = False
        self._lock = threading.Lock()

    def lost(self, last_heard_s: float) -> None:
        """Not connected since `last_heard_s` on the clock; −inf: since now."""
        with self._lock:
            if self._limit_s and self._timer is None:
                now = self._clock()
                since = last_heard_s if last_heard_s > float("-inf") else now
                self._timer = threading.Timer(
                    max(0.0, since + self._limit_s - now), lambda: self._expire(timer)
                )
                timer = self._timer
                timer.daemon = True
                timer.start()

    def back(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._is_stale:
                self._is_stale = False
                self._tell(False)

    def _expire(self, timer: threading.Timer) -> None:
        with self._lock:
            if self._timer is timer:
                self._is_stale = True
                self._tell(True)
