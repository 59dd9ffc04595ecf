"""What the core has to say to frontends since it was last asked."""

from __future__ import annotations

from engine_svc.core.sequence import LiveRequest, Sequence
from engine_svc.types import (
    Admitted,
    Failure,
    FinishReason,
    OutputItem,
    RequestEnded,
    RequestStats,
    Sample,
    SequenceOutput,
)


class Outputs:
    """Items in the order in which they happened; bounded by what one step can produce, since the
    process takes them after every step."""

    def __init__(self) -> None:
        self._items: list[OutputItem] = []

    def admitted(self, request_id: str) -> None:
        self._items.append(Admitted(request_id))

    def refused(self, request_id: str, prompt_tokens: int, failure: Failure) -> None:
        stats = RequestStats(prompt_tokens=prompt_tokens)
        self._items.append(RequestEnded(request_id, stats, failure))

    def token(
        self, sequence: Sequence, sample: Sample, reason: FinishReason | None, stop_token_id: int
    ) -> None:
        logprobs = () if sample.logprobs is None else (sample.logprobs,)
        self._items.append(
            SequenceOutput(
                sequence.live.request.request_id,
                sequence.choice,
                (sample.token_id,),
                logprobs,
                reason,
                stop_token_id,
            )
        )

    def ended(self, live: LiveRequest, failure: Failure | None) -> None:
        prompt_logprobs = tuple(live.prompt_logprobs) if failure is None else ()
        self._items.append(
            RequestEnded(live.request.request_id, live.stats(), failure, prompt_logprobs)
        )

    def take(self) -> tuple[OutputItem, ...]:
        items, self._items = tuple(self._items), []
        return items
