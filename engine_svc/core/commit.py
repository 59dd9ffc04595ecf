"""Commit a step: its tokens reach their sequences, what ended leaves, full pages are remembered."""

from __future__ import annotations

from engine_svc.core import failures
from engine_svc.core.books import Books
from engine_svc.core.build import LaunchedStep
from engine_svc.core.sequence import LiveRequest, Sequence, SequenceState
from engine_svc.types import FinishReason, PromptLogprobs, Sample, StepResult


def commit_step(books: Books, launched: LaunchedStep, result: StepResult, now: float) -> None:
    """Take in the result of the oldest step in flight."""
    plan = launched.plan
    assert result.step == plan.step, f"step {result.step} came back, {plan.step} is next"
    assert len(result.samples) == launched.num_samples, "samples and seats differ"
    books.memory.pool.committed_step = plan.step
    for part in result.prompt_logprobs:
        _take_prompt_logprobs(launched, part)
    samples = [(launched.by_seat[sample.seat], sample) for sample in result.samples]
    broken = {sequence for sequence, sample in samples if sample.token_id < 0}
    for sequence, incarnation, end in launched.rows:
        if incarnation == sequence.incarnation and sequence not in broken:
            _remember_pages(books, sequence, end)
    for sampled, sample in samples:
        assert sampled is not None, f"seat {sample.seat} was given to nobody"
        _take_sample(books, sampled, sample, now)
    _let_leave(books)


def cut_choice(books: Books, live: LiveRequest, choice: int, keep_tokens: int, now: float) -> None:
    """The frontend found a stop string: the first `keep_tokens` tokens are the answer."""
    if choice >= len(live.sequences):
        return
    sequence = live.sequences[choice]
    sequence.stop_decoding()
    live.discarded_tokens += len(sequence.output_ids[keep_tokens:])
    del sequence.output_ids[keep_tokens:]
    if sequence.state is not SequenceState.ENDED:
        books.end_sequence(sequence)
        if live.finished:
            books.end_request(live, None, now)


def _take_sample(books: Books, sequence: Sequence, sample: Sample, now: float) -> None:
    """The step's hot loop: one call for each token."""
    live = sequence.live
    token_id = sample.token_id
    if sequence.names_tokens:
        sequence.pending -= 1
    if sequence.state is SequenceState.ENDED:
        return
    if token_id < 0:
        _break(books, sequence, now)
        return
    output = sequence.output_ids
    output.append(token_id)
    sampling = live.request.sampling
    stops = token_id in sampling.eos_token_ids or token_id in sampling.stop_token_ids
    if stops and len(output) > sampling.min_tokens:
        reason, stop_token_id = FinishReason.STOP, token_id
    elif sequence.num_prompt + len(output) >= sequence.max_total:
        reason, stop_token_id = FinishReason.LENGTH, -1
    else:
        books.outputs.token(sequence, sample, None, -1)
        return
    books.outputs.token(sequence, sample, reason, stop_token_id)
    _remember_pages(books, sequence, min(sequence.num_planned, sequence.num_known - 1))
    books.rates.choice_ended(len(output))
    books.end_sequence(sequence)
    if live.finished:
        books.end_request(live, None, now)


def _break(books: Books, sequence: Sequence, now: float) -> None:
    """Its logits were not finite: the token in flight was none."""
    if not sequence.names_tokens:
        sequence.stop_decoding()
        sequence.pending -= 1
    live = sequence.live
    failure = failures.not_finite(live.request.request_id, live.request.adapter)
    books.end_request(live, failure, now)


def _take_prompt_logprobs(launched: LaunchedStep, part: PromptLogprobs) -> None:
    """Entries by position from 1 on; positions computed again after a preemption are skipped."""
    sequence = launched.by_seat[part.seat]
    assert sequence is not None, f"seat {part.seat} was given to nobody"
    live = sequence.live
    for position, token in enumerate(part.tokens, part.first_position):
        if position == len(live.prompt_logprobs) + 1:
            live.prompt_logprobs.append(token)


def _remember_pages(books: Books, sequence: Sequence, end: int) -> None:
    """Full pages of known tokens go into the prefix index."""
    page_size = books.limits.page_size
    num_full = min(end, sequence.num_known) // page_size
    if num_full <= sequence.num_indexed or not books.limits.prefix_cache:
        return
    live = sequence.live
    if not live.uses_prefix_index:
        return
    while sequence.index_open and sequence.num_indexed < num_full:
        index = sequence.num_indexed
        tokens = sequence.token_ids(index * page_size, (index + 1) * page_size)
        node = books.memory.remember(
            live.prefix_root, sequence.index_node, tokens, sequence.page_ids[index]
        )
        if node is None:
            sequence.index_open = False
            return
        sequence.index_node, sequence.num_indexed = node, index + 1


def _let_leave(books: Books) -> None:
    """Pages of ended sequences go when no launched step uses them any more."""
    if not books.leaving:
        return
    still = []
    for sequence in books.leaving:
        if books.in_flight(sequence):
            still.append(sequence)
        else:
            books.release_pages(sequence)
    books.leaving = still
