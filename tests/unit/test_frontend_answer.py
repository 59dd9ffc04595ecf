from pathlib import Path

import pytest

from engine_svc.failures import failure_of
from engine_svc.frontend.answer import Answer, Pace
from engine_svc.frontend.choices import Choice
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.types import (
    Admitted,
    FinishReason,
    RequestEnded,
    RequestStats,
    SequenceOutput,
    Waits,
)
from loraplex.engine.v1 import engine_pb2
from loraplex.status import LoraplexError, Unavailable


@pytest.fixture(scope="module")
def text(demo_model_dir: Path) -> ModelText:
    return ModelText.load(demo_model_dir)


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def answer_of(text: ModelText, clock: Clock, n: int = 1, stop: str = "") -> Answer:
    stops = (stop,) if stop else ()
    choices = [Choice(text.detokenizer(), stops, 0) for _ in range(n)]
    started = engine_pb2.Started(request_id="r", prompt_tokens=4)
    return Answer(
        started, choices, text.detokenizer, lambda choice, keep: None, Pace(clock(), clock)
    )


def tokens(text: ModelText, words: str, choice: int = 0, *, last: bool = False) -> SequenceOutput:
    reason = FinishReason.LENGTH if last else None
    return SequenceOutput("r", choice, text.tokenizer.encode(words), finish_reason=reason)


def test_first_token_time_and_time_per_token_follow_the_clock(text: ModelText) -> None:
    clock = Clock()
    answer = answer_of(text, clock)
    assert (answer.pace.ttft_s, answer.tpot_s) == (None, None)
    for second in (103.0, 104.0, 107.0):
        answer.begin([tokens(text, " one")])
        clock.s = second
        answer.pace.sent()
    assert answer.pace.ttft_s == 3.0
    assert answer.tpot_s == 2.0


def test_one_token_has_no_time_per_token(text: ModelText) -> None:
    clock = Clock()
    answer = answer_of(text, clock)
    answer.begin([tokens(text, " one")])
    answer.pace.sent()
    assert (answer.pace.ttft_s, answer.tpot_s) == (0.0, None)


def test_time_per_token_counts_the_longest_choice(text: ModelText) -> None:
    clock = Clock()
    answer = answer_of(text, clock, n=2)
    answer.begin([tokens(text, " one two three", 0), tokens(text, " one", 1)])
    answer.pace.sent()
    clock.s += 4.0
    answer.pace.sent()
    assert answer.tpot_s == 2.0


def test_items_of_one_take_become_one_delta_a_choice_before_its_end(text: ModelText) -> None:
    answer = answer_of(text, Clock(), n=2)
    messages = answer.begin(
        [
            Admitted("r"),
            tokens(text, " one", 0),
            tokens(text, " one", 1),
            tokens(text, " two", 0, last=True),
            tokens(text, " two", 1),
        ]
    )
    shown = [(m.WhichOneof("item"), m.delta.choice, m.delta.text) for m in messages]
    assert shown == [
        ("started", 0, ""),
        ("delta", 0, " one two"),
        ("finished", 0, ""),
        ("delta", 1, " one two"),
    ]


def test_tokens_after_a_stop_string_are_dropped_and_counted_as_discarded(text: ModelText) -> None:
    answer = answer_of(text, Clock(), stop="two")
    answer.begin([tokens(text, "one two")])
    assert answer.begin([tokens(text, " three")]) == []
    stats = RequestStats(completion_tokens=3, discarded_tokens=1, prompt_tokens=4)
    answer.begin([RequestEnded("r", stats)])
    usage = answer.end(RequestEnded("r", stats)).summary.usage
    assert (usage.completion_tokens, usage.discarded_tokens) == (2, 2)


def test_the_summary_holds_what_the_core_counted(text: ModelText) -> None:
    stats = RequestStats(Waits(1.0, 2.0, 4.0, 8.0), paused_s=5.0, load_s=6.0, cached_tokens=3)
    summary = answer_of(text, Clock()).end(RequestEnded("r", stats)).summary
    waits = (summary.wait_place_s, summary.wait_load_s, summary.wait_kv_s, summary.wait_budget_s)
    assert waits == (1.0, 2.0, 4.0, 8.0)
    assert (summary.queue_s, summary.load_s, summary.paused_s) == (15.0, 6.0, 5.0)
    assert (summary.usage.prompt_tokens, summary.usage.cached_tokens) == (4, 3)
    assert (summary.ttft_s, summary.tpot_s) == (0.0, 0.0)


@pytest.mark.parametrize(("words", "delivered"), [("", "0"), (" one two", "2")])
def test_a_lost_engine_says_how_many_tokens_were_delivered(
    words: str, delivered: str, text: ModelText
) -> None:
    answer = answer_of(text, Clock())
    answer.begin([tokens(text, words)])
    lost = RequestEnded("r", RequestStats(), failure_of(Unavailable("x", reason="ENGINE_LOST")))
    with pytest.raises(LoraplexError) as caught:
        answer.end(lost)
    assert caught.value.metadata == {"tokens_delivered": delivered}
