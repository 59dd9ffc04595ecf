"""What a folder's tokenizer files say: vocabulary, chat template, end-of-sequence ids.

Only JSON is read; nothing is tokenized here. Used for base models and for adapters alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loraplex.adapter_format.jsontext import canonical_json, parse_object
from loraplex.status import AdapterRefused

#: special tokens that a chat template may name
SPECIAL_TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
MAX_TOKENIZER_BYTES = 64 << 20
#: an engine renders templates up to this size
MAX_TEMPLATE_BYTES = 256 << 10
#: files that are read, and therefore stored with an adapter
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def text_digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode("utf-8")).hexdigest()


def vocabulary(files: Mapping[str, Path]) -> dict[str, int] | None:
    """The token → id map of `tokenizer.json`, added tokens included; None without the file.

    Raises: AdapterRefused VOCABULARY_MISMATCH when it cannot be read.
    """
    path = files.get("tokenizer.json")
    if path is None:
        return None
    table = _load(path, "tokenizer.json", MAX_TOKENIZER_BYTES)
    model = table.get("model")
    entries = model.get("vocab") if isinstance(model, dict) else None
    tokens: dict[str, int] = {}
    if isinstance(entries, dict):
        tokens.update(entries)
    elif isinstance(entries, list) and all(
        isinstance(entry, list) and entry and isinstance(entry[0], str) for entry in entries
    ):
        tokens.update((entry[0], index) for index, entry in enumerate(entries))
    else:
        raise _unreadable("tokenizer.json", "holds no vocabulary")
    added = table.get("added_tokens") or []
    for token in added if isinstance(added, list) else [None]:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise _unreadable("tokenizer.json", "added_tokens cannot be read")
        tokens[token["content"]] = token.get("id", -1)
    if not all(isinstance(index, int) and not isinstance(index, bool) for index in tokens.values()):
        raise _unreadable("tokenizer.json", "a token's id is no whole number")
    return tokens


def vocabulary_digest(tokens: Mapping[str, int]) -> str:
    """`sha256:…` over the sorted token → id map."""
    return "sha256:" + hashlib.sha256(canonical_json(dict(tokens))).hexdigest()


def chat_template(files: Mapping[str, Path]) -> str | None:
    """The default chat template of a folder, None when it has none."""
    if "chat_template.jinja" in files:
        data = _bytes(files["chat_template.jinja"], "chat_template.jinja", MAX_TEMPLATE_BYTES)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _unreadable("chat_template.jinja", "is no UTF-8 text") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        if name in files:
            value = _load(files[name], name, MAX_TOKENIZER_BYTES).get("chat_template")
            if isinstance(value, list):
                value = _default_of(value)
            if isinstance(value, str):
                if len(value.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
                    raise _unreadable(name, f"chat_template exceeds {MAX_TEMPLATE_BYTES} bytes")
                return value
    return None


def template_tokens(files: Mapping[str, Path], template: str) -> dict[str, str] | None:
    """Special tokens that `template` names, as `tokenizer_config.json` spells them; None without
    the file, or when the template names none."""
    path = files.get("tokenizer_config.json")
    names = [name for name in SPECIAL_TOKENS if name in template]
    if path is None or not names:
        return None
    table = _load(path, "tokenizer_config.json", MAX_TOKENIZER_BYTES)
    found: dict[str, str] = {}
    for name in names:
        value = table.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def generation_eos(files: Mapping[str, Path]) -> tuple[int, ...] | None:
    """`eos_token_id` of `generation_config.json`, sorted; None when it does not say."""
    path = files.get("generation_config.json")
    if path is None:
        return None
    value = _load(path, "generation_config.json", MAX_TEMPLATE_BYTES).get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
        raise _unreadable("generation_config.json", f"eos_token_id is {str(value)[:100]}")
    return tuple(sorted(set(ids)))


def tokenizer_eos(files: Mapping[str, Path], tokens: Mapping[str, int]) -> int | None:
    """The id of `eos_token` in `tokenizer_config.json`; None when it is not named or unknown."""
    path = files.get("tokenizer_config.json")
    if path is None:
        return None
    token = _load(path, "tokenizer_config.json", MAX_TOKENIZER_BYTES).get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    return tokens.get(token) if isinstance(token, str) else None


def _default_of(templates: list[Any]) -> str | None:
    for template in templates:
        if isinstance(template, dict) and template.get("name") == "default":
            text = template.get("template")
            return text if isinstance(text, str) else None
    return None


def _load(path: Path, name: str, limit: int) -> dict[str, Any]:
    return parse_object(_bytes(path, name, limit), name, "VOCABULARY_MISMATCH")


def _bytes(path: Path, name: str, limit: int) -> bytes:
    try:
        with path.open("rb") as stream:
            data = stream.read(limit + 1)
    except OSError as error:
        raise _unreadable(name, f"cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise _unreadable(name, f"is longer than {limit} bytes")
    return data


def _unreadable(name: str, problem: str) -> AdapterRefused:
    return AdapterRefused(
        f"{name}: {problem}",
        reason="VOCABULARY_MISMATCH",
        metadata={"field": name, "value": problem, "limit": "a readable tokenizer file"},
    )
