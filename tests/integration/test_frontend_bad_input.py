"""Inputs that Generate refuses, over a real socket: each names field, value and limit."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_svc.frontend.text.model_text import ModelText
from loraplex.engine.v1 import engine_pb2
from loraplex.status import from_rpc_error
from tests.support.frontend_server import BASE, adapter, error_of, name_map, running_frontend


@pytest.fixture(scope="module")
def text(demo_model_dir: Path) -> ModelText:
    return ModelText.load(demo_model_dir, 64)


def chat(*messages: tuple[str, str]) -> engine_pb2.ChatMessages:
    return engine_pb2.ChatMessages(
        messages=[engine_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )


def ids(*token_ids: int) -> engine_pb2.TokenIds:
    return engine_pb2.TokenIds(ids=token_ids)


REFUSED: list[tuple[str, dict[str, Any], str, dict[str, str]]] = [
    ("no input", {}, "FIELD_INVALID", {"field": "input"}),
    ("empty prompt", {"prompt": ""}, "PROMPT_EMPTY", {"field": "prompt"}),
    ("no ids", {"token_ids": ids()}, "PROMPT_EMPTY", {"field": "token_ids.ids"}),
    ("no messages", {"chat": chat()}, "PROMPT_EMPTY", {"field": "chat.messages"}),
    ("no role", {"chat": chat(("", "x"))}, "FIELD_INVALID", {"field": "chat.messages[0].role"}),
    (
        "long prompt",
        {"prompt": "word " * 100},
        "PROMPT_TOO_LONG",
        {"prompt_tokens": "101", "limit": "63"},
    ),
    (
        "endless prompt",
        {"prompt": "x" * (64 * 256 + 1)},
        "FIELD_INVALID",
        {
            "field": "characters of prompt",
            "value": "16385",
            "limit": "at most 16384 characters",
        },
    ),
    (
        "endless chat",
        {"chat": chat(("user", "x" * 10000), ("user", "x" * 10000))},
        "FIELD_INVALID",
        {"field": "characters of chat", "value": "20040"},
    ),
    (
        "many empty messages",
        {"chat": chat(*[("user", "")] * 1025)},
        "FIELD_INVALID",
        {"field": "characters of chat", "value": "16400"},
    ),
    (
        "many ids",
        {"token_ids": ids(*[-1] * 64)},
        "PROMPT_TOO_LONG",
        {"prompt_tokens": "64", "limit": "63"},
    ),
    (
        "id too large",
        {"token_ids": ids(1, 49152)},
        "FIELD_INVALID",
        {"field": "token_ids.ids[1]", "value": "49152", "limit": "in 0 … 49151"},
    ),
    (
        "negative id",
        {"token_ids": ids(-1)},
        "FIELD_INVALID",
        {"field": "token_ids.ids[0]", "value": "-1"},
    ),
    ("no model", {"prompt": "x", "model": ""}, "FIELD_INVALID", {"field": "model"}),
    ("long model", {"prompt": "x", "model": "m" * 257}, "FIELD_INVALID", {"field": "model"}),
    (
        "negative max_tokens",
        {"prompt": "x", "sampling": {"max_tokens": -1}},
        "SAMPLING_INVALID",
        {"field": "sampling.max_tokens", "value": "-1", "limit": "at least 1"},
    ),
    (
        "empty stop",
        {"prompt": "x", "sampling": {"stop": [""]}},
        "SAMPLING_INVALID",
        {"field": "sampling.stop[0]", "value": "''"},
    ),
    (
        "long request id",
        {"prompt": "x", "request_id": "r" * 129},
        "FIELD_INVALID",
        {"field": "request_id", "limit": "at most 128 printable characters"},
    ),
    (
        "request id with a line break",
        {"prompt": "x", "request_id": "a\nb"},
        "FIELD_INVALID",
        {"field": "request_id"},
    ),
    (
        "long salt",
        {"prompt": "x", "cache_salt": "s" * 257},
        "FIELD_INVALID",
        {"field": "cache_salt"},
    ),
    (
        "service class",
        {"prompt": "x", "service_class": 9},
        "FIELD_INVALID",
        {"field": "service_class", "value": "9"},
    ),
]


@pytest.mark.parametrize(
    ("fields", "reason", "metadata"),
    [pytest.param(*case[1:], id=case[0]) for case in REFUSED],
)
async def test_bad_input_is_refused_before_the_core_hears_of_it(
    fields: dict[str, Any], reason: str, metadata: dict[str, str], text: ModelText
) -> None:
    async with running_frontend(text) as frontend:
        error = await frontend.refusal(**fields)
        assert frontend.link.requests == []
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == reason
    assert {key: error.metadata.get(key) for key in metadata} == metadata
    assert (frontend.observer.records[0].outcome, frontend.observer.records[0].reason) == (
        "INVALID_ARGUMENT",
        reason,
    )


async def test_a_grammar_is_unimplemented_by_name(text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        error = await frontend.refusal(prompt="x", sampling={"json_schema": "{}"})
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.metadata["field"] == "sampling.json_schema"


async def test_an_adapters_endless_template_fails_its_chat_only(text: ModelText) -> None:
    names = name_map(
        adapter("broken", chat_template="{{ raise_exception('system first' + '!' * 90000) }}"),
        adapter("heavy", chat_template="{{ 'x' * 10**9 }}"),
    )
    async with running_frontend(text, names=names) as frontend:
        broken = await frontend.refusal(model="broken", chat=chat(("user", "x")))
        heavy = await frontend.refusal(model="heavy", chat=chat(("user", "x")))
        assert await frontend.answer(model=BASE, prompt="x")
    assert "system first" in broken.message
    assert len(broken.message) < 1000
    assert {broken.reason, heavy.reason} == {"CHAT_TEMPLATE_FAILED"}


async def test_chat_without_any_template_is_refused(text: ModelText) -> None:
    bare = ModelText(
        text.tokenizer, text.detokenizer, None, text.special_tokens, text.eos_token_ids, 64
    )
    async with running_frontend(bare) as frontend:
        error = await frontend.refusal(chat=chat(("user", "x")))
    assert error.reason == "CHAT_TEMPLATE_FAILED"
    assert "no chat template" in error.message


@pytest.mark.parametrize("count", [62, 63])
async def test_prompts_up_to_the_context_are_served(count: int, text: ModelText) -> None:
    async with running_frontend(text) as frontend:
        messages = await frontend.answer(token_ids=ids(*range(100, 100 + count)))
    assert messages[-1].summary.usage.completion_tokens == 64 - count


@pytest.mark.parametrize("content", [b"\xff\xff\xff", b"\x12\x04\xed\xa0\x80x"])
@pytest.mark.parametrize("method", ["Generate", "ListModels"])
async def test_bytes_that_are_no_request_are_refused(
    method: str, content: bytes, text: ModelText
) -> None:
    async with running_frontend(text) as frontend:
        path = f"/loraplex.engine.v1.Engine/{method}"
        if method == "Generate":
            error = await error_of(frontend.channel.unary_stream(path)(content))
        else:
            with pytest.raises(grpc.RpcError) as caught:
                await frontend.channel.unary_unary(path)(b"\xff" + content)
            error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
    assert error.metadata["field"] == "request"
    assert "DecodeError" not in error.message
