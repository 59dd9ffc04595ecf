"""Routes what the core says in one message a step to the streams of the requests it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine_svc.failures import failure_of
from engine_svc.frontend.core_link import LinkPhase, OutputStream, require_serving
from engine_svc.types import OutputItem, RequestEnded, RequestStats
from loraplex.status import LoraplexError, ResourceExhausted, Unavailable


@dataclass(frozen=True, slots=True)
class BufferLimits:
    """How far a reader may fall behind: `max_items` waiting for `grace_s` seconds, or twice as many
    at once."""

    max_items: int = 1024
    grace_s: float = 2.0


class OutputRouter:
    """The open streams of one frontend, by request id; also the link's phase.

    `cancel` is told of a request whose reader was too slow. `now` is CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        cancel: Callable[[str], None],
        now: Callable[[], float],
        limits: BufferLimits | None = None,
    ) -> None:
        self._cancel = cancel
        self._now = now
        self._limits = limits or BufferLimits()
        self._streams: dict[str, OutputStream] = {}
        self._watchers: list[Callable[[LinkPhase], None]] = []
        self.phase = LinkPhase.STARTING

    def __len__(self) -> int:
        return len(self._streams)

    def set_phase(self, phase: LinkPhase) -> None:
        """Change the phase and tell the watchers, if it is another one."""
        if phase is self.phase:
            return
        self.phase = phase
        for callback in self._watchers:
            callback(phase)

    def watch_phase(self, callback: Callable[[LinkPhase], None]) -> None:
        self._watchers.append(callback)

    def open(self, request_id: str) -> OutputStream:
        """The stream of a request that is about to be sent.

        Raises: Unavailable STARTING or DRAINING.
        """
        require_serving(self.phase)
        assert request_id not in self._streams, request_id
        stream = self._streams[request_id] = OutputStream()
        return stream

    def close(self, request_id: str) -> bool:
        """Forget a request; what the core still says of it is ignored. True: it had not ended."""
        return self._streams.pop(request_id, None) is not None

    def deliver(self, items: Iterable[OutputItem]) -> None:
        """Hand the items of one StepOutputs to their streams."""
        for item in items:
            stream = self._streams.get(item.request_id)
            if stream is None:
                continue
            if isinstance(item, RequestEnded):
                del self._streams[item.request_id]
            elif len(stream) >= self._limits.max_items and self._is_too_slow(stream):
                self._overflow(item.request_id, stream)
                continue
            stream.put(item)

    def lose_core(self) -> None:
        """The core died: every open request ends with ENGINE_LOST, new ones get STARTING."""
        lost = Unavailable(
            "the engine's core process died while this request was open; send it again",
            reason="ENGINE_LOST",
            retry_after_s=1.0,
        )
        streams, self._streams = self._streams, {}
        self.set_phase(LinkPhase.STARTING)
        for request_id, stream in streams.items():
            stream.put(ending(request_id, lost))

    def check_integrity(self) -> None:
        """No open stream has ended."""
        for request_id, stream in self._streams.items():
            assert not stream.ended, request_id

    def _is_too_slow(self, stream: OutputStream) -> bool:
        now = self._now()
        if stream.full_since is None:
            stream.full_since = now
        waited = now - stream.full_since
        return waited > self._limits.grace_s or len(stream) >= 2 * self._limits.max_items

    def _overflow(self, request_id: str, stream: OutputStream) -> None:
        del self._streams[request_id]
        self._cancel(request_id)
        limit = self._limits.max_items
        stream.cut(
            ending(
                request_id,
                ResourceExhausted(
                    f"the client reads more slowly than the engine answers: {limit} messages wait;"
                    " read faster, or ask for fewer tokens",
                    reason="READER_TOO_SLOW",
                    metadata={"limit": str(limit)},
                ),
            )
        )


def ending(request_id: str, error: LoraplexError) -> RequestEnded:
    """The end that a frontend gives to a request."""
    return RequestEnded(request_id, RequestStats(), failure_of(error))
