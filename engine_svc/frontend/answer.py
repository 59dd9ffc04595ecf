"""Items of one request → messages to its client: started, deltas, finished a choice, summary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine_svc.failures import error_of
from engine_svc.frontend.choices import Choice, ChoiceUpdate
from engine_svc.frontend.text.detokenizer import DetokenizerFactory
from engine_svc.types import Admitted, OutputItem, RequestEnded, RequestStats, SequenceOutput
from engine_svc.types import TokenLogprobs as CoreLogprobs
from loraplex.engine.v1 import engine_pb2

Message = engine_pb2.GenerateResponse


class Pace:
    """When tokens went out.

    TTFT: received → first token sent. TPOT: (last − first token time) / (tokens − 1), with the
    tokens of the longest choice.
    """

    __slots__ = ("_first_s", "_last_s", "_now", "_received_s")

    def __init__(self, received_s: float, now: Callable[[], float]) -> None:
        self._received_s = received_s
        self._now = now
        self._first_s: float | None = None
        self._last_s = 0.0

    def sent(self) -> None:
        """A message with tokens has gone out."""
        self._last_s = self._now()
        if self._first_s is None:
            self._first_s = self._last_s

    @property
    def ttft_s(self) -> float | None:
        return None if self._first_s is None else self._first_s - self._received_s

    def tpot_s(self, num_tokens: int) -> float | None:
        if self._first_s is None or num_tokens < 2:
            return None
        return (self._last_s - self._first_s) / (num_tokens - 1)


class Answer:
    """State of one request's answer. `stop_choice(choice, keep_tokens)` tells the core that a stop
    string ended a choice."""

    def __init__(
        self,
        started: engine_pb2.Started,
        choices: Sequence[Choice],
        detokenizer: DetokenizerFactory,
        stop_choice: Callable[[int, int], None],
        pace: Pace,
    ) -> None:
        self._started = started
        self._choices = choices
        self._detokenizer = detokenizer
        self._stop_choice = stop_choice
        self.pace = pace
        self.stats = RequestStats()

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def discarded_tokens(self) -> int:
        beyond = self.stats.completion_tokens - self.completion_tokens
        return self.stats.discarded_tokens + max(0, beyond)

    @property
    def tpot_s(self) -> float | None:
        return self.pace.tpot_s(max(choice.num_tokens for choice in self._choices))

    def begin(self, items: Sequence[OutputItem]) -> list[Message]:
        """Messages for these items, without the summary. The tokens that one choice got are merged
        into one delta, so a client that lags catches up with fewer messages."""
        messages: list[Message] = []
        open_deltas: dict[int, engine_pb2.Delta] = {}
        for item in items:
            if isinstance(item, SequenceOutput):
                self._add(item, open_deltas, messages)
            elif isinstance(item, Admitted):
                messages.append(Message(started=self._started))
            else:
                self.stats = item.stats
        messages += [Message(delta=delta) for delta in open_deltas.values()]
        return messages

    def end(self, ended: RequestEnded) -> Message:
        """The summary. Raises: the LoraplexError that the core ended this request with."""
        if ended.failure is not None:
            error = error_of(ended.failure)
            if error.reason == "ENGINE_LOST" or self.completion_tokens:
                error.metadata["tokens_delivered"] = str(self.completion_tokens)
            raise error
        waits, stats, pace = ended.stats.waits, ended.stats, self.pace
        return Message(
            summary=engine_pb2.Summary(
                adapter=self._started.adapter,
                usage=engine_pb2.Usage(
                    prompt_tokens=self._started.prompt_tokens,
                    cached_tokens=stats.cached_tokens,
                    completion_tokens=self.completion_tokens,
                    discarded_tokens=self.discarded_tokens,
                ),
                queue_s=waits.queue_s,
                wait_place_s=waits.place_s,
                wait_load_s=waits.load_s,
                wait_kv_s=waits.kv_s,
                wait_budget_s=waits.budget_s,
                load_s=stats.load_s,
                ttft_s=pace.ttft_s or 0.0,
                tpot_s=self.tpot_s or 0.0,
                paused_s=stats.paused_s,
                prompt_logprobs=self._prompt_logprobs(ended.prompt_logprobs),
            )
        )

    def _add(
        self,
        output: SequenceOutput,
        open_deltas: dict[int, engine_pb2.Delta],
        messages: list[Message],
    ) -> None:
        choice = self._choices[output.choice]
        if choice.finished:
            return
        update = choice.feed(output)
        delta = open_deltas.get(output.choice)
        if delta is None:
            delta = open_deltas[output.choice] = engine_pb2.Delta(
                choice=output.choice, text=update.text, token_ids=update.token_ids
            )
        else:
            delta.text += update.text
            delta.token_ids.extend(update.token_ids)
        if update.logprobs:
            delta.logprobs.extend(self._position(position) for position in update.logprobs)
        if update.finish_reason is not None:
            del open_deltas[output.choice]
            if delta.token_ids or delta.text:
                messages.append(Message(delta=delta))
            messages.append(Message(finished=_finished(output.choice, update)))
        if update.stopped_here:
            self._stop_choice(output.choice, choice.num_tokens)

    def _position(self, position: CoreLogprobs) -> engine_pb2.PositionLogprobs:
        return engine_pb2.PositionLogprobs(
            chosen=self._token(position.token_id, position.logprob),
            top=[self._token(token_id, logprob) for token_id, logprob in position.top],
        )

    def _token(self, token_id: int, logprob: float) -> engine_pb2.TokenLogprob:
        text = self._detokenizer.token_text(token_id)
        return engine_pb2.TokenLogprob(token_id=token_id, token=text, logprob=logprob)

    def _prompt_logprobs(
        self, positions: Sequence[CoreLogprobs]
    ) -> list[engine_pb2.PositionLogprobs]:
        """One per prompt token; the first has nothing before it and stays empty."""
        if not positions:
            return []
        known = [self._position(position) for position in positions]
        return [engine_pb2.PositionLogprobs(), *known]


def _finished(choice: int, update: ChoiceUpdate) -> engine_pb2.Finished:
    assert update.finish_reason is not None
    finished = engine_pb2.Finished(
        choice=choice,
        reason=engine_pb2.FinishReason.ValueType(update.finish_reason.value),
        stop_string=update.stop_string,
    )
    if update.stop_token_id >= 0:
        finished.stop_token_id = update.stop_token_id
    return finished
