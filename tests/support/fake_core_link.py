"""A core without a model: plays scripts to a frontend through the real router.

A script is a function of the request that yields the items of one step after the other; HOLD waits
for `resume()`. Without a script the prompt's tokens come back, one a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from engine_svc.frontend.core_link import LinkPhase, OutputStream
from engine_svc.frontend.router import BufferLimits, OutputRouter
from engine_svc.snapshots import CoreSnapshot, RequestExplanation
from engine_svc.types import (
    Admitted,
    Failure,
    FinishReason,
    OutputItem,
    Request,
    RequestEnded,
    RequestStats,
    SequenceOutput,
    Waits,
)
from loraplex.status import Unavailable

Step = tuple[OutputItem, ...]
Script = Callable[[Request], Iterator[Step]]
HOLD: Step = (Admitted("hold"),)


class FakeCoreLink:
    """Implements CoreLink. `requests`, `cancelled` and `stopped` record what the frontend said."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        phase: LinkPhase = LinkPhase.SERVING,
        limits: BufferLimits | None = None,
        state: CoreSnapshot | None = None,
    ) -> None:
        self.script = script or self.echo
        self.router = OutputRouter(self.cancel, time.monotonic, limits)
        self.router.set_phase(phase)
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.stopped: list[tuple[str, int, int]] = []
        self._state = state or CoreSnapshot()
        #: what `explain` answers
        self.explanations: dict[str, RequestExplanation] = {}
        self._resumed = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def phase(self) -> LinkPhase:
        return self.router.phase

    def watch_phase(self, callback: Callable[[LinkPhase], None]) -> None:
        self.router.watch_phase(callback)

    def submit(self, request: Request) -> OutputStream:
        stream = self.router.open(request.request_id)
        self.requests.append(request)
        task = asyncio.get_running_loop().create_task(self._play(request))
        self._tasks[request.request_id] = task
        return stream

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self.router.close(request_id)
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def stop_choice(self, request_id: str, choice: int, keep_tokens: int) -> None:
        self.stopped.append((request_id, choice, keep_tokens))

    async def snapshot(self) -> CoreSnapshot:
        if self.phase is LinkPhase.STARTING:
            raise Unavailable("no core yet", reason="STARTING")
        return self._state

    async def explain(self, request_id: str) -> RequestExplanation | None:
        return self.explanations.get(request_id)

    def resume(self) -> None:
        """Let scripts that wait at HOLD go on."""
        self._resumed.set()

    def die(self) -> None:
        """What the frontend sees of a core that was killed."""
        for task in self._tasks.values():
            task.cancel()
        self.router.lose_core()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def echo(self, request: Request) -> Iterator[Step]:
        yield (Admitted(request.request_id),)
        tokens = request.prompt_token_ids[: request.sampling.max_tokens]
        for index, token_id in enumerate(tokens):
            done = FinishReason.LENGTH if index == len(tokens) - 1 else None
            yield tuple(
                SequenceOutput(request.request_id, choice, (token_id,), finish_reason=done)
                for choice in range(request.sampling.n)
                if (request.request_id, choice) not in {stop[:2] for stop in self.stopped}
            )
        yield (ended(request, completion_tokens=len(tokens) * request.sampling.n),)

    async def _play(self, request: Request) -> None:
        for step in self.script(request):
            if step is HOLD:
                await self._resumed.wait()
                continue
            self.router.deliver(step)
            await asyncio.sleep(0)


def ended(
    request: Request, *, failure: Failure | None = None, completion_tokens: int = 0
) -> RequestEnded:
    """The last item of a request that waited a quarter of a second for a place and as long for a
    load."""
    stats = RequestStats(
        waits=Waits(place_s=0.25, load_s=0.25),
        load_s=0.125,
        paused_s=0.5,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=1,
        completion_tokens=completion_tokens,
    )
    return RequestEnded(request.request_id, stats, failure)
