"""Text → token ids with the model folder's own tokenizer.json, as transformers does for prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loraplex.status import BaseModelUnsupported, FieldInvalid


class PromptTokenizer:
    """Encodes prompts. `vocab_size` is the model's number of embedding rows."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.backend = tokenizer
        self.vocab_size = vocab_size

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int) -> PromptTokenizer:
        """Read tokenizer.json; its own post-processor says what surrounds a prompt.

        Raises: BaseModelUnsupported: a file is missing or cannot be read.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise BaseModelUnsupported(
                "tokenizer.json",
                f"missing in {model_dir.name}",
                "a file that `AutoTokenizer.save_pretrained` writes",
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise BaseModelUnsupported(
                "tokenizer.json", str(error), "what the tokenizers library reads"
            ) from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, vocab_size)

    def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text. `special_tokens`: with what the tokenizer adds around a prompt, if
        anything; a rendered chat has them already.

        Raises: FieldInvalid: the text holds a token that the model has no row for.
        """
        # the batch form lets other threads run, and skips the offsets
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=special_tokens)
        ids = tuple(encoding.ids)
        self.check_ids(ids, "prompt")
        return ids

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises: FieldInvalid: an id outside the vocabulary."""
        if ids and (min(ids) < 0 or max(ids) >= self.vocab_size):
            index = next(i for i, value in enumerate(ids) if not 0 <= value < self.vocab_size)
            raise FieldInvalid(f"{field}[{index}]", ids[index], f"in 0 … {self.vocab_size - 1}")


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file of a model folder; {} when there is no such file.

    Raises: BaseModelUnsupported: the file is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise BaseModelUnsupported(path.name, str(error), "a JSON object") from error
    if not isinstance(value, dict):
        raise BaseModelUnsupported(path.name, type(value).__name__, "a JSON object")
    return value


def special_token(config: Mapping[str, Any], key: str) -> str | None:
    """A special token of tokenizer_config.json, written as a string or as an added-token object."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
