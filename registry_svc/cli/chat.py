"""What a version says of its chats: which template, which special tokens, which end tokens."""

from __future__ import annotations

from loraplex.adapter_format import Manifest
from loraplex.adapter_format.tokenizer import text_digest


def chat_fields(manifest: Manifest) -> dict[str, object]:
    """Field → value, for people."""
    template, tokens, eos = (
        manifest.chat_template, manifest.template_tokens, manifest.eos_token_ids,
    )  # fmt: skip
    own = "" if template is None else f"the adapter's own, {text_digest(template)[:19]}"
    named = "" if not tokens else ", ".join(f"{name} {text!r}" for name, text in tokens.items())
    return {
        "chat template": own or "the base model's",
        "template tokens": named,
        "end tokens": "the base model's" if eos is None else ", ".join(map(str, eos)),
    }


def chat_json(manifest: Manifest) -> dict[str, object]:
    """The same for programs; null is the base model's."""
    template, eos = manifest.chat_template, manifest.eos_token_ids
    return {
        "chat_template_digest": None if template is None else text_digest(template),
        "template_tokens": manifest.template_tokens,
        "eos_token_ids": None if eos is None else list(eos),
    }
