"""Tokens → text and stop strings together, against the full decode."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_svc.frontend.choices import Choice, ChoiceUpdate
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.types import FinishReason, SequenceOutput, TokenLogprobs

LENGTH = FinishReason.LENGTH


@pytest.fixture(scope="module")
def text(demo_model_dir: Path) -> ModelText:
    return ModelText.load(demo_model_dir)


def outputs_of(ids: list[int], cuts: list[int]) -> list[SequenceOutput]:
    """The ids in pieces of these sizes, the last piece ends the choice."""
    outputs, rest = [], ids
    for size in cuts:
        outputs.append(SequenceOutput("r", 0, tuple(rest[:size])))
        rest = rest[size:]
    return [*outputs, SequenceOutput("r", 0, tuple(rest), finish_reason=LENGTH)]


def run(choice: Choice, outputs: list[SequenceOutput]) -> list[ChoiceUpdate]:
    updates = []
    for output in outputs:
        updates.append(choice.feed(output))
        if choice.finished:
            return updates
    raise AssertionError("the choice did not finish")


@given(
    ids=st.lists(st.integers(0, 49151), max_size=30),
    cuts=st.lists(st.integers(0, 5), max_size=6),
    span=st.tuples(st.integers(0, 200), st.integers(1, 8)),
)
def test_text_before_the_first_stop_whatever_the_pieces(
    ids: list[int], cuts: list[int], span: tuple[int, int], text: ModelText
) -> None:
    whole = text.tokenizer.backend.decode(ids, skip_special_tokens=True)
    start = span[0] % (len(whole) + 1)
    stop = whole[start : start + span[1]] or "never"
    choice = Choice(text.detokenizer(), (stop,), 0)
    updates = run(choice, outputs_of(ids, cuts))
    said = "".join(update.text for update in updates)
    last = updates[-1]
    if stop not in whole:
        assert (said, last.finish_reason, last.stop_string) == (whole, LENGTH, "")
        return
    assert said == whole[: whole.index(stop)]
    assert (last.finish_reason, last.stop_string) == (FinishReason.STOP, stop)
    kept = sum(len(update.token_ids) for update in updates)
    assert kept == choice.num_tokens
    decode = text.detokenizer()
    shorter = "".join(decode.feed(token) for token in ids[: kept - 1])
    assert stop not in shorter


def test_log_probabilities_end_where_the_tokens_do(text: ModelText) -> None:
    ids = text.tokenizer.encode("one two three")
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in ids)
    choice = Choice(text.detokenizer(), ("two",), 0)
    update = choice.feed(SequenceOutput("r", 0, ids, logprobs))
    assert update.token_ids == ids[:2]
    assert update.logprobs == logprobs[:2]
    assert update.stopped_here


def test_a_stop_in_the_last_tokens_needs_no_word_to_the_core(text: ModelText) -> None:
    ids = text.tokenizer.encode("one two")
    choice = Choice(text.detokenizer(), ("two",), 0)
    update = choice.feed(SequenceOutput("r", 0, ids, finish_reason=LENGTH))
    assert update.finish_reason is FinishReason.STOP
    assert not update.stopped_here


def test_text_held_for_a_stop_comes_out_at_the_end(text: ModelText) -> None:
    ids = text.tokenizer.encode("one two")
    choice = Choice(text.detokenizer(), (" two three",), 0)
    first = choice.feed(SequenceOutput("r", 0, ids))
    last = choice.feed(SequenceOutput("r", 0, (), finish_reason=LENGTH))
    assert (first.text, last.text) == ("one", " two")


@pytest.mark.parametrize(
    ("min_tokens", "said"), [(1, "a"), (2, "a b"), (3, "a b b"), (4, "a b b b")]
)
def test_no_stop_string_counts_within_min_tokens(
    min_tokens: int, said: str, text: ModelText
) -> None:
    ids = [*text.tokenizer.encode("a b"), *text.tokenizer.encode(" b b")]
    choice = Choice(text.detokenizer(), (" b",), min_tokens)
    assert "".join(u.text for u in run(choice, outputs_of(ids, [1, 1, 1, 1]))) == said
