"""All that the frontend knows of a base model's text: tokenizer, template, end tokens, context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine_svc.frontend.text.chat_template import (
    ChatTemplate,
    read_special_tokens,
)
from engine_svc.frontend.text.detokenizer import DetokenizerFactory
from engine_svc.frontend.text.tokenizer import PromptTokenizer, read_json_object
from loraplex.base_folder import base_chat
from loraplex.base_model import parse_config
from loraplex.status import BaseModelUnsupported


@dataclass(frozen=True, slots=True)
class ModelText:
    """Read once at the start; shared by all requests."""

    tokenizer: PromptTokenizer
    detokenizer: DetokenizerFactory
    #: None: the folder has no chat template
    chat_template: ChatTemplate | None
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    context_tokens: int
    template_source: str | None = None

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @classmethod
    def load(cls, model_dir: Path, context_tokens: int = 0) -> ModelText:
        """Read a Hugging Face folder. `context_tokens` 0: the model's own limit.

        Raises: BaseModelUnsupported: a file is missing or not understood. ChatTemplateFailed: the
        template is no template.
        """
        config = read_json_object(model_dir / "config.json")
        if not config:
            raise BaseModelUnsupported("config.json", "missing", "a Hugging Face model folder")
        spec = parse_config(config)
        tokenizer = PromptTokenizer.load(model_dir, spec.vocab_size)
        special_tokens = read_special_tokens(model_dir)
        source, eos_token_ids = base_chat(model_dir, spec)
        return cls(
            tokenizer=tokenizer,
            detokenizer=DetokenizerFactory(tokenizer.backend),
            chat_template=None if source is None else ChatTemplate(source, special_tokens),
            template_source=source,
            special_tokens=special_tokens,
            eos_token_ids=eos_token_ids,
            context_tokens=min(context_tokens or spec.context_tokens, spec.context_tokens),
        )
