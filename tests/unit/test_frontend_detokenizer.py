from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine_svc.frontend.text.detokenizer import (
    ByteLevelDetokenizer,
    DetokenizerFactory,
    WindowDetokenizer,
    is_byte_level,
)


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def factory(tokenizer: Tokenizer) -> DetokenizerFactory:
    return DetokenizerFactory(tokenizer)


def pieces_of(factory: DetokenizerFactory, ids: list[int]) -> list[str]:
    detokenizer = factory()
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


def test_demo_tokenizer_is_byte_level(factory: DetokenizerFactory) -> None:
    assert isinstance(factory(), ByteLevelDetokenizer)


@given(text=st.text(max_size=60))
def test_pieces_of_any_text_join_to_the_text(
    text: str, tokenizer: Tokenizer, factory: DetokenizerFactory
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(pieces_of(factory, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_pieces_of_any_ids_join_to_the_full_decode(
    ids: list[int], tokenizer: Tokenizer, factory: DetokenizerFactory
) -> None:
    assert "".join(pieces_of(factory, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text(st.characters(min_codepoint=0x80, exclude_categories=["Cs"]), max_size=30))
def test_no_piece_holds_half_a_character(
    text: str, tokenizer: Tokenizer, factory: DetokenizerFactory
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    # the vocabulary lacks some bytes of unassigned characters
    assume("\ufffd" not in text and tokenizer.decode(ids) == text)
    assert not any("\ufffd" in piece for piece in pieces_of(factory, ids))


def test_a_character_of_several_tokens_comes_with_its_last_one(
    tokenizer: Tokenizer, factory: DetokenizerFactory
) -> None:
    ids = tokenizer.encode("🦥", add_special_tokens=False).ids
    assert len(ids) > 1
    assert pieces_of(factory, ids) == [*[""] * (len(ids) - 1), "🦥", ""]


def test_a_cut_character_is_marked_at_the_end(
    tokenizer: Tokenizer, factory: DetokenizerFactory
) -> None:
    ids = tokenizer.encode("🦥", add_special_tokens=False).ids[:-1]
    *pieces, rest = pieces_of(factory, ids)
    assert "".join(pieces) == ""
    assert rest == "\ufffd"


def test_special_tokens_have_no_text_but_a_name(factory: DetokenizerFactory) -> None:
    assert pieces_of(factory, [1, 2]) == ["", "", ""]
    assert factory.token_text(1) == "<|im_start|>"


def test_an_id_without_a_token_has_no_text(factory: DetokenizerFactory) -> None:
    assert pieces_of(factory, [10**6]) == ["", ""]
    assert factory.token_text(10**6) == ""


def sentence_piece_tokenizer() -> Tokenizer:
    """A vocabulary in the style of Llama 2: ▁ for spaces, <0xNN> for bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "!", "▁"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_other_decoders_stream_through_a_window() -> None:
    tokenizer = sentence_piece_tokenizer()
    factory = DetokenizerFactory(tokenizer)
    sloth = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "🦥".encode()]
    hello, world, bang = (tokenizer.token_to_id(word) for word in ("▁Hello", "▁world", "!"))
    ids = [hello, *sloth, world, bang]
    assert not is_byte_level(tokenizer)
    assert isinstance(factory(), WindowDetokenizer)
    assert pieces_of(factory, ids) == ["Hello", "", "", "", "🦥", " world", "!", ""]
    assert tokenizer.decode(ids) == "Hello🦥 world!"


def test_a_window_keeps_the_space_after_the_prompt() -> None:
    tokenizer = sentence_piece_tokenizer()
    hello, world = (tokenizer.token_to_id(word) for word in ("▁Hello", "▁world"))
    assert DetokenizerFactory(tokenizer)((hello,)).feed(world) == " world"


def test_a_window_gives_up_on_bytes_that_never_become_a_character() -> None:
    tokenizer = sentence_piece_tokenizer()
    detokenizer = DetokenizerFactory(tokenizer)()
    bad = tokenizer.token_to_id("<0xFF>")
    text = "".join(detokenizer.feed(bad) for _ in range(20)) + detokenizer.flush()
    assert text == "\ufffd" * 20
