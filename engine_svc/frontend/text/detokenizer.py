"""Token ids → text as they come, one choice each: whole characters only, O(1) a token.

Concatenated, what `feed` and `flush` return equals the tokenizer's decode of all ids at once
(special tokens skipped). For byte-level vocabularies (Llama 3, Qwen, SmolLM) that is exact for
any ids, since each token is a fixed string of bytes. Others (SentencePiece style) are decoded in
a short window that starts a few tokens back, where only malformed byte sequences can differ.
"""

from __future__ import annotations

import codecs
import json
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
#: A character has at most four bytes; a window of undecodable tokens longer than this is emitted.
_WINDOW_TOKENS = 8
_CONTEXT_TOKENS = 6


class Detokenizer(Protocol):
    """State of one choice."""

    def feed(self, token_id: int) -> str:
        """Text that this token completes; "" while bytes of a character are missing."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for each malformed part."""
        ...


class TokenBytes:
    """Bytes of each token of a byte-level vocabulary, found once; special tokens have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {
            token_id: b""
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }

    def __getitem__(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else _token_bytes(token)
        return found


class ByteLevelDetokenizer:
    """Feeds the tokens' bytes to an incremental UTF-8 decoder."""

    __slots__ = ("_bytes", "_decoder")

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Decodes the last few tokens twice, without and with the new ones; the difference is the text.

    `context` are the last prompt tokens: they decide about a leading space.
    """

    __slots__ = ("_ids", "_pending", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, context: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._pending) < _WINDOW_TOKENS:
            return ""
        return self._accept(text)

    def flush(self) -> str:
        return self._accept(self._new_text()) if self._pending else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        after = self._tokenizer.decode(self._ids + self._pending, skip_special_tokens=True)
        return after[len(before) :]

    def _accept(self, text: str) -> str:
        self._ids = (self._ids + self._pending)[-_CONTEXT_TOKENS:]
        self._pending = []
        return text


class DetokenizerFactory:
    """Makes the detokenizer that fits the tokenizer's own decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer) if is_byte_level(tokenizer) else None
        self._special = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }

    def __call__(self, prompt_token_ids: tuple[int, ...] = ()) -> Detokenizer:
        if self._token_bytes is not None:
            return ByteLevelDetokenizer(self._token_bytes)
        return WindowDetokenizer(self._tokenizer, prompt_token_ids)

    def token_text(self, token_id: int) -> str:
        """One token on its own, special ones by name, as log probabilities show it."""
        if token_id in self._special:
            return self._special[token_id]
        if self._token_bytes is not None:
            return self._token_bytes[token_id].decode("utf-8", "replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's decoder is the byte-level one alone."""
    decoder = json.loads(tokenizer.to_str())["decoder"] or {}
    parts = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [part.get("type") for part in parts] == ["ByteLevel"]


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Source: GPT-2's encoder: printable bytes stand for themselves, the others follow from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF_CHARACTER = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """Bytes of a vocabulary entry; an added token that leaves the alphabet is its own UTF-8."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode("utf-8")
