"""Base model folders made from sizes alone: a config, a tokenizer, and if wanted random weights.

Engines serve such a folder with --load-format dummy; the tokenizer has a text for every token id,
so that detokenizing costs what it costs with a real vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from benchmarks.shared.made_adapters import CONFIG_8B

#: two layers with the 8B model's proportions: a dry run on a CPU
CONFIG_TINY: dict[str, Any] = {
    **CONFIG_8B, "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 224,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "eos_token_id": 2047, "dtype": "float32",
}  # fmt: skip
SHAPES: dict[str, Mapping[str, Any]] = {"8b": CONFIG_8B, "tiny": CONFIG_TINY}
_SYLLABLES = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "wu", "xa", "ye", "zi", "do",
              "fe", "gu", "ha", "jo", "pi", "qua")  # fmt: skip


def write_model_folder(folder: Path, config: Mapping[str, Any], *, tokenizer: bool = True) -> Path:
    """config.json, and what serving needs beside it: no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if tokenizer:
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(int(config["vocab_size"]))))
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    return folder


_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Byte-level: the 256 bytes, then words of syllables that no merge makes, one an id."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (
        "".join(parts) for length in range(2, 6) for parts in product(_SYLLABLES, repeat=length)
    )
    pieces += [f"Ġ{word}" for word in islice(words, vocab_size - len(pieces))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": True}  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": {piece: index for index, piece in enumerate(pieces)}, "merges": [],
        },
    }  # fmt: skip
