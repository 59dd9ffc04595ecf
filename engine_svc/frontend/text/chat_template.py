"""Renders chat messages with a model's Jinja template, in Jinja's sandbox, as transformers does.

A template can read the messages and the special tokens and nothing else of ours: the sandbox
refuses attributes that begin with an underscore, changes of objects and imports. The base model's
template is the operator's choice and runs in this process, with limits on its size and on its
output. One that came with an adapter is a stranger's program: it runs in a process of its own
(template_process.py), where time and memory have limits too.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_svc.frontend.text.tokenizer import read_json_object, special_token
from loraplex.adapter_format.tokenizer import MAX_TEMPLATE_BYTES, SPECIAL_TOKENS
from loraplex.status import InvalidArgument

#: Characters of a template's source; publishing refuses longer ones too.
TEMPLATE_LIMIT = MAX_TEMPLATE_BYTES
#: Characters of a rendered chat.
OUTPUT_LIMIT = 16 * 2**20
#: Characters of what a template raised that its caller is told: error trailers are small.
_CAUSE_LIMIT = 500
Message = Mapping[str, str]


class ChatTemplateFailed(InvalidArgument):
    """The template is missing, is no template, or refused the messages."""

    default_reason = "CHAT_TEMPLATE_FAILED"


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises: ChatTemplateFailed: too long, or not a Jinja template."""
        if len(source) > TEMPLATE_LIMIT:
            raise ChatTemplateFailed(
                f"the chat template has {len(source)} characters; at most {TEMPLATE_LIMIT}",
                metadata={"field": "chat_template", "limit": str(TEMPLATE_LIMIT)},
            )
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise _failed(error) from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Raises: ChatTemplateFailed: the template raised, or its text is too long."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                size += len(piece)
                if size > OUTPUT_LIMIT:
                    raise ChatTemplateFailed(
                        f"the rendered chat has more than {OUTPUT_LIMIT} characters",
                        metadata={"field": "chat", "limit": str(OUTPUT_LIMIT)},
                    )
                pieces.append(piece)
        except ChatTemplateFailed:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError,
                AttributeError, RecursionError, MemoryError) as error:  # fmt: skip
            raise _failed(error) from error
        return "".join(pieces)


def read_special_tokens(model_dir: Path) -> Mapping[str, str]:
    """What templates see as bos_token, eos_token …"""
    config = read_json_object(model_dir / "tokenizer_config.json")
    found = ((key, special_token(config, key)) for key in SPECIAL_TOKENS)
    return {key: token for key, token in found if token is not None}


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it only renders."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _failed(error: Exception) -> ChatTemplateFailed:
    cause = str(error)[:_CAUSE_LIMIT]
    return ChatTemplateFailed(
        f"the chat template refused the messages: {cause}", metadata={"field": "chat"}
    )
