"""Tokens of one choice → text, stop strings and the choice's end. No gRPC, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine_svc.frontend.text.detokenizer import Detokenizer
from engine_svc.frontend.text.stop_strings import StopMatcher
from engine_svc.types import FinishReason, SequenceOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """What one SequenceOutput adds to a choice."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    stop_token_id: int = -1
    #: the core does not know yet that this choice has ended
    stopped_here: bool = False


class Choice:
    """State of one choice.

    A stopping token is counted and reported but not part of the text. A stop string that ends
    within the first `min_tokens` tokens does not count.
    """

    __slots__ = ("_detokenizer", "_matcher", "_min_tokens", "finished", "num_tokens")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.finished = False

    def feed(self, output: SequenceOutput) -> ChoiceUpdate:
        """Take the core's next tokens; must not be called once finished."""
        text = ""
        last = len(output.token_ids) - 1
        for index, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if index == last and token_id == output.stop_token_id:
                continue
            piece = self._detokenizer.feed(token_id)
            match = self._matcher.feed(piece, armed=self.num_tokens > self._min_tokens)
            text += match.text
            if match.stop is not None:
                return self._stopped(output, text, index + 1, match.stop)
        if output.finish_reason is None:
            return ChoiceUpdate(text, output.token_ids, output.logprobs)
        return self._ended(output, text)

    def _stopped(self, output: SequenceOutput, text: str, num_kept: int, stop: str) -> ChoiceUpdate:
        self.finished = True
        return ChoiceUpdate(
            text,
            output.token_ids[:num_kept],
            output.logprobs[:num_kept],
            FinishReason.STOP,
            stop_string=stop,
            stopped_here=output.finish_reason is None,
        )

    def _ended(self, output: SequenceOutput, text: str) -> ChoiceUpdate:
        self.finished = True
        match = self._matcher.feed(self._detokenizer.flush())
        text += match.text
        if match.stop is not None:
            return ChoiceUpdate(
                text, output.token_ids, output.logprobs, FinishReason.STOP, match.stop
            )
        return ChoiceUpdate(
            text + self._matcher.flush(),
            output.token_ids,
            output.logprobs,
            output.finish_reason,
            stop_token_id=output.stop_token_id,
        )
