"""Generate over a real socket, with a scripted core behind it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_svc.frontend.inputs import PromptReader
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.types import (
    Admitted,
    FinishReason,
    Request,
    SequenceOutput,
    ServiceClass,
    TokenLogprobs,
)
from loraplex.engine.v1 import engine_pb2
from tests.support.fake_core_link import FakeCoreLink, Step, ended
from tests.support.frontend_server import (
    BASE,
    adapter,
    name_map,
    running_frontend,
    text_of,
    token_ids_of,
)

PROMPT = "Grüße, 你好 🦥! Three more words."


@pytest.fixture(scope="module")
def text(demo_model_dir: Path) -> ModelText:
    return ModelText.load(demo_model_dir)


def kinds_of(messages: list[engine_pb2.GenerateResponse]) -> list[str]:
    return [message.WhichOneof("item") or "" for message in messages]


async def test_started_comes_first_finished_once_and_summary_last(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        messages = await frontend.answer(prompt=PROMPT, request_id="mine")
    started, *middle, finished, summary = messages
    ids = list(text.tokenizer.encode(PROMPT))
    assert kinds_of(messages)[0] == "started"
    assert set(kinds_of(middle)) == {"delta"}
    assert text_of(messages) == PROMPT
    assert token_ids_of(messages) == ids
    assert started.started.request_id == "mine"
    assert started.started.base_model == BASE
    assert started.started.adapter.name == ""
    assert started.started.prompt_tokens == len(ids)
    assert finished.finished.reason == engine_pb2.FINISH_REASON_LENGTH
    assert summary.summary.usage.completion_tokens == len(ids)
    assert summary.summary.queue_s == summary.summary.wait_place_s + summary.summary.wait_load_s
    assert 0 < summary.summary.ttft_s < 20


async def test_choices_stream_side_by_side_and_finish_once_each(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        messages = await frontend.answer(prompt=PROMPT, sampling={"n": 3})
    assert [text_of(messages, choice) for choice in range(3)] == [PROMPT] * 3
    finished = [m.finished.choice for m in messages if m.HasField("finished")]
    assert sorted(finished) == [0, 1, 2]
    assert kinds_of(messages)[-1] == "summary"
    assert messages[-1].summary.usage.completion_tokens == 3 * len(text.tokenizer.encode(PROMPT))


async def test_a_stop_string_ends_the_choice_and_tells_the_core(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        messages = await frontend.answer(prompt=PROMPT, sampling={"stop": ["e more w", "never"]})
        (request,) = frontend.link.requests
        ((request_id, choice, keep),) = frontend.link.stopped
    (finished,) = [m.finished for m in messages if m.HasField("finished")]
    assert text_of(messages) == PROMPT[: PROMPT.index("e more w")]
    assert finished.reason == engine_pb2.FINISH_REASON_STOP
    assert finished.stop_string == "e more w"
    assert not finished.HasField("stop_token_id")
    assert (request_id, choice) == (request.request_id, 0)
    assert keep == len(token_ids_of(messages))
    usage = messages[-1].summary.usage
    assert usage.completion_tokens == keep
    assert usage.discarded_tokens == len(request.prompt_token_ids) - keep


async def test_min_tokens_keeps_an_early_stop_string_in_the_text(text: ModelText) -> None:
    sampling = {"stop": ["Gr", "more"], "min_tokens": 4, "max_tokens": 100}
    async with running_frontend(text) as frontend:
        messages = await frontend.answer(prompt=PROMPT, sampling=sampling)
    assert text_of(messages) == PROMPT[: PROMPT.index("more")]


async def test_a_stopping_token_is_reported_but_not_part_of_the_text(text: ModelText) -> None:
    hello, stop = text.tokenizer.encode("Hello")[0], 42

    def script(request: Request) -> Iterator[Step]:
        yield (Admitted(request.request_id),)
        yield (
            SequenceOutput(
                request.request_id,
                0,
                (hello, stop),
                finish_reason=FinishReason.STOP,
                stop_token_id=stop,
            ),
        )
        yield (ended(request, completion_tokens=2),)

    async with running_frontend(text, FakeCoreLink(script)) as frontend:
        messages = await frontend.answer(prompt="x", sampling={"stop_token_ids": [stop]})
    (finished,) = [m.finished for m in messages if m.HasField("finished")]
    assert text_of(messages) == "Hello"
    assert token_ids_of(messages) == [hello, stop]
    assert finished.stop_token_id == stop
    assert finished.reason == engine_pb2.FINISH_REASON_STOP


async def test_tokens_of_one_step_travel_in_one_delta(text: ModelText) -> None:
    ids = text.tokenizer.encode(PROMPT)

    def script(request: Request) -> Iterator[Step]:
        outputs = tuple(SequenceOutput(request.request_id, 0, (token,)) for token in ids)
        last = SequenceOutput(request.request_id, 0, (), finish_reason=FinishReason.LENGTH)
        yield (Admitted(request.request_id), *outputs, last, ended(request))

    async with running_frontend(text, FakeCoreLink(script)) as frontend:
        messages = await frontend.answer(prompt=PROMPT)
    assert kinds_of(messages) == ["started", "delta", "finished", "summary"]
    assert text_of(messages) == PROMPT


async def test_log_probabilities_name_their_tokens(text: ModelText) -> None:
    hello, world = text.tokenizer.encode("Hello world")
    logprobs = TokenLogprobs(hello, -0.5, ((hello, -0.5), (2, -1.5)))

    def script(request: Request) -> Iterator[Step]:
        yield (Admitted(request.request_id),)
        done = FinishReason.LENGTH
        yield (SequenceOutput(request.request_id, 0, (hello,), (logprobs,), done),)
        end = ended(request)
        prompt = (TokenLogprobs(world, -2.0),)
        yield (type(end)(end.request_id, end.stats, None, prompt),)

    async with running_frontend(text, FakeCoreLink(script)) as frontend:
        messages = await frontend.answer(
            prompt="Hello world", sampling={"logprobs": 1, "prompt_logprobs": 0}
        )
        assert frontend.link.requests[0].sampling.logprobs == 1
        assert frontend.link.requests[0].sampling.prompt_logprobs == 0
    (position,) = next(m.delta.logprobs for m in messages if m.HasField("delta"))
    assert (position.chosen.token, position.chosen.logprob) == ("Hello", -0.5)
    assert [top.token for top in position.top] == ["Hello", "<|im_end|>"]
    first, second = messages[-1].summary.prompt_logprobs
    assert not first.HasField("chosen")
    assert second.chosen.token == " world"


async def test_an_adapter_is_named_in_started_and_summary_and_reaches_the_core(
    text: ModelText,
) -> None:
    async with running_frontend(text) as frontend:
        messages = await frontend.answer(model="sql-lora", prompt="SELECT")
        (request,) = frontend.link.requests
    identity = messages[0].started.adapter
    assert (identity.name, identity.version) == ("sql-lora", 1)
    assert identity.digest == "sha256:sql-lora-1"
    assert messages[-1].summary.adapter == identity
    assert request.adapter == adapter("sql-lora")
    assert request.flow.digest == "sha256:sql-lora-1"
    assert request.flow.tenant == "default"
    assert request.flow.service_class is ServiceClass.INTERACTIVE


async def test_an_older_version_is_reached_by_number_and_digest(text: ModelText) -> None:
    names = name_map(adapter("a", 2), older=[adapter("a", 1)])
    async with running_frontend(text, names=names) as frontend:
        for model in ("a@1", "a@sha256:a-1"):
            messages = await frontend.answer(model=model, prompt="x")
            assert messages[0].started.adapter.version == 1


async def test_chat_is_rendered_with_the_models_template(text: ModelText) -> None:
    chat = engine_pb2.ChatMessages(messages=[engine_pb2.ChatMessage(role="user", content="Hi")])
    async with running_frontend(text) as frontend:
        messages = await frontend.answer(chat=chat, return_inputs=True)
    started = messages[0].started
    assert started.prompt.startswith("<|im_start|>system\n")
    assert started.prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert list(started.prompt_token_ids[:1]) == [1]
    assert text.tokenizer.backend.decode(
        list(started.prompt_token_ids), skip_special_tokens=False
    ) == (started.prompt)


async def test_an_adapters_own_template_and_end_tokens_are_used(text: ModelText) -> None:
    own = adapter("own", chat_template="<{{ messages[0].content }}>", eos_token_ids=(17, 18))
    chat = engine_pb2.ChatMessages(messages=[engine_pb2.ChatMessage(role="user", content="Hi")])
    async with running_frontend(text, names=name_map(own, adapter("plain"))) as frontend:
        messages = await frontend.answer(model="own", chat=chat, return_inputs=True)
        await frontend.answer(model="plain", chat=chat)
        await frontend.answer(model="own", chat=chat, sampling={"ignore_eos": True})
        eos = [request.sampling.eos_token_ids for request in frontend.link.requests]
    assert messages[0].started.prompt == "<Hi>"
    assert eos == [(17, 18), (2,), ()]


async def test_inputs_are_repeated_only_when_asked_for(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        messages = await frontend.answer(token_ids=engine_pb2.TokenIds(ids=[5, 6]))
        asked = await frontend.answer(token_ids=engine_pb2.TokenIds(ids=[5]), return_inputs=True)
    assert not messages[0].started.prompt_token_ids
    assert list(asked[0].started.prompt_token_ids) == [5]


async def test_a_seed_is_passed_on_or_drawn_and_reported(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        given = await frontend.answer(prompt="x", sampling={"seed": 2**64 - 1})
        drawn = [await frontend.answer(prompt="x") for _ in range(2)]
        seeds = [request.sampling.seed for request in frontend.link.requests]
    assert given[0].started.seed == seeds[0] == 2**64 - 1
    assert [messages[0].started.seed for messages in drawn] == seeds[1:]
    assert seeds[1] != seeds[2]


async def test_many_streams_run_at_once(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        prompts = [f"{PROMPT} {index}" for index in range(32)]
        answers = await asyncio.gather(*(frontend.answer(prompt=prompt) for prompt in prompts))
        assert len(frontend.link.router) == 0
    assert [text_of(messages) for messages in answers] == prompts


async def test_the_loop_goes_on_while_a_long_prompt_is_tokenized(text: ModelText) -> None:
    reader = PromptReader(text)
    request = engine_pb2.GenerateRequest(model=BASE, prompt="The quick brown fox, " * 50_000)
    reading = asyncio.create_task(reader.read(request, None))
    beats = 0
    while not reading.done():
        await asyncio.sleep(0.001)
        beats += 1
    await reader.close()
    assert len((await reading).token_ids) == 250_001
    assert beats > 10
