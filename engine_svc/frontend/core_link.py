"""What the frontend needs from the core, wherever it runs: one Protocol, and the streams behind it.

`CoreLink` is implemented over a socket (engine_svc/processes) and in-process; both let an
`OutputRouter` (engine_svc/frontend/router.py) keep one `OutputStream` for each open request.
Everything here belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable
from typing import Protocol

from engine_svc.snapshots import CoreSnapshot, RequestExplanation
from engine_svc.types import OutputItem, Request, RequestEnded
from loraplex.status import Unavailable

#: Items that one `take` hands over at most: bounds the size of a merged Delta.
TAKE_LIMIT = 256


class LinkPhase(enum.Enum):
    """Whether the core takes requests."""

    #: not connected yet, or the core died and is being restarted
    STARTING = "starting"
    SERVING = "serving"
    #: open requests are finished, new ones refused
    DRAINING = "draining"


class OutputStream:
    """The items of one request, in order; the last one is always a RequestEnded.

    The router puts, one reader takes. `was_cut`: the frontend itself ended the request, because its
    reader was too slow or the drain's time was over; what waited was thrown away.
    """

    __slots__ = ("_items", "_waiter", "ended", "full_since", "was_cut")

    def __init__(self) -> None:
        self._items: deque[OutputItem] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        self.was_cut = False
        #: when the buffer was first found full; None: it has room
        self.full_since: float | None = None

    def __len__(self) -> int:
        return len(self._items)

    async def take(self) -> tuple[OutputItem, ...]:
        """All that waits (at most TAKE_LIMIT items), after waiting for one; () after the end."""
        while not self._items:
            if self.ended:
                return ()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self.full_since = None
        count = min(len(self._items), TAKE_LIMIT)
        return tuple(self._items.popleft() for _ in range(count))

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> OutputItem:
        if not self._items and self.ended:
            raise StopAsyncIteration
        while not self._items:
            items = await self.take()
            self._items.extendleft(reversed(items))
        return self._items.popleft()

    def put(self, item: OutputItem) -> None:
        """Router only: append an item and wake the reader."""
        self._items.append(item)
        self.ended = self.ended or isinstance(item, RequestEnded)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cut(self, ending: RequestEnded) -> None:
        """Throw away what waits and end. The core must be told to cancel."""
        if self.ended:
            return
        self._items.clear()
        self.was_cut = True
        self.put(ending)


class CoreLink(Protocol):
    """The core as one frontend sees it. No call blocks; only `snapshot` and `explain` wait for
    the core."""

    @property
    def phase(self) -> LinkPhase: ...

    def watch_phase(self, callback: Callable[[LinkPhase], None]) -> None:
        """Call `callback` at every change of phase, in the loop."""
        ...

    def submit(self, request: Request) -> OutputStream:
        """Hand a request to the core.

        Raises: Unavailable STARTING or DRAINING; nothing was sent then.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Nobody listens any more: the core frees what the request holds. Unknown ids and repeated
        calls do nothing."""
        ...

    def stop_choice(self, request_id: str, choice: int, keep_tokens: int) -> None:
        """A stop string ended this choice: its first `keep_tokens` tokens are the answer."""
        ...

    async def snapshot(self) -> CoreSnapshot:
        """The core's picture of itself. Raises: Unavailable STARTING without a core."""
        ...

    async def explain(self, request_id: str) -> RequestExplanation | None:
        """Why an open request waits; None: there is none. Raises: as `snapshot`."""
        ...


def require_serving(phase: LinkPhase) -> None:
    """Raises: Unavailable STARTING or DRAINING."""
    if phase is LinkPhase.STARTING:
        raise Unavailable(
            "the engine has not finished starting; try again soon",
            reason="STARTING",
            retry_after_s=1.0,
        )
    if phase is LinkPhase.DRAINING:
        raise Unavailable(
            "the engine is shutting down and takes no new requests; use another one",
            reason="DRAINING",
            retry_after_s=1.0,
        )
