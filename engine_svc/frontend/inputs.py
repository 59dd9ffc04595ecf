"""The prompt of a request, as token ids: text, ids or chat messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from engine_svc.frontend.sampling import room_for_answer
from engine_svc.frontend.text.chat_template import ChatTemplateFailed, Message
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.frontend.text.template_process import TemplateProcess
from engine_svc.types import AdapterRef
from loraplex.engine.v1 import engine_pb2
from loraplex.status import FieldInvalid, InvalidArgument

#: Longer texts are tokenized in a thread, so that other streams go on: about 2 ms of work.
_INLINE_CHARACTERS = 2048
#: More characters for each token of the context than this are refused before they are tokenized.
_CHARACTERS_A_TOKEN = 256
_ROLE_LIMIT = 64
#: What a template adds around a message, about: many empty messages are a long chat too.
_MESSAGE_CHARACTERS = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what was tokenized; "" for a prompt of token ids."""

    token_ids: tuple[int, ...]
    text: str


class PromptReader:
    """Reads the `input` of requests. `close` ends its thread and its template process."""

    def __init__(self, text: ModelText, threads: int = 1) -> None:
        self._text = text
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._templates = TemplateProcess()

    async def read(self, request: engine_pb2.GenerateRequest, adapter: AdapterRef | None) -> Prompt:
        """Raises: InvalidArgument PROMPT_EMPTY, FieldInvalid, ChatTemplateFailed."""
        kind = request.WhichOneof("input")
        if kind == "prompt":
            if not request.prompt:
                raise prompt_empty("prompt", "at least one character")
            self._check_size("prompt", len(request.prompt))
            return await self._encoded(request.prompt, special_tokens=True)
        if kind == "token_ids":
            if not request.token_ids.ids:
                raise prompt_empty("token_ids.ids", "at least one token id")
            room_for_answer(len(request.token_ids.ids), self._text.context_tokens)
            ids = tuple(request.token_ids.ids)
            self._text.tokenizer.check_ids(ids, "token_ids.ids")
            return Prompt(ids, "")
        if kind == "chat":
            return await self._encoded(
                await self._rendered(request.chat, adapter), special_tokens=False
            )
        raise FieldInvalid("input", "unset", "one of prompt, token_ids, chat")

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._templates.close()

    async def _encoded(self, text: str, *, special_tokens: bool) -> Prompt:
        encode = self._text.tokenizer.encode
        token_ids = await self._run(len(text), lambda: encode(text, special_tokens=special_tokens))
        return Prompt(token_ids, text)

    async def _rendered(self, chat: engine_pb2.ChatMessages, adapter: AdapterRef | None) -> str:
        size = _MESSAGE_CHARACTERS * len(chat.messages)
        self._check_size("chat", size)
        size += sum(len(message.role) + len(message.content) for message in chat.messages)
        self._check_size("chat", size)
        messages = _messages(chat)
        opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
        if adapter is not None and (own := self._own_template(adapter)) is not None:
            return await self._templates.render(*own, messages, opens)
        template = self._text.chat_template
        if template is None:
            raise ChatTemplateFailed(
                "this model has no chat template; send `prompt` or `token_ids`",
                metadata={"field": "chat"},
            )
        return await self._run(size, lambda: template.render(messages, opens))

    def _own_template(self, adapter: AdapterRef) -> tuple[str, Mapping[str, str]] | None:
        """Source and special tokens where either is not the base's."""
        base, own = self._text.special_tokens, adapter.template_tokens
        tokens = base if own is None else dict(own)
        if adapter.chat_template is not None:
            return adapter.chat_template, tokens
        source = self._text.template_source
        if own is None or source is None:
            return None
        named = {name: token for name, token in base.items() if name in source}
        return None if tokens == named else (source, tokens)

    def _check_size(self, field: str, num_characters: int) -> None:
        limit = _CHARACTERS_A_TOKEN * self._text.context_tokens
        if num_characters > limit:
            allowed = f"at most {limit} characters"
            raise FieldInvalid(f"characters of {field}", num_characters, allowed)

    async def _run(self, num_characters: int, work: Callable[[], T]) -> T:
        if num_characters <= _INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def prompt_empty(field: str, limit: str) -> InvalidArgument:
    return InvalidArgument(
        f"{field} is empty; must be {limit}",
        reason="PROMPT_EMPTY",
        metadata={"field": field, "value": "''", "limit": limit},
    )


def _messages(chat: engine_pb2.ChatMessages) -> Sequence[Message]:
    if not chat.messages:
        raise prompt_empty("chat.messages", "at least one message")
    for index, message in enumerate(chat.messages):
        if not 1 <= len(message.role) <= _ROLE_LIMIT:
            field = f"chat.messages[{index}].role"
            raise FieldInvalid(field, message.role, f"1 … {_ROLE_LIMIT} characters")
    return [{"role": message.role, "content": message.content} for message in chat.messages]
