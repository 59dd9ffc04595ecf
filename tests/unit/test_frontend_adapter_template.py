"""A chat for an adapter gives the prompt ids that the adapter's own tokenizer gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine_svc.frontend.inputs import PromptReader
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.names import token_pairs
from engine_svc.types import AdapterRef
from loraplex.adapter_format import CheckedAdapter, check_adapter, read_folder
from loraplex.base_folder import read_base_folder
from loraplex.engine.v1 import engine_pb2
from tests.support.tiny_model import TINY_NAME, write_tiny_adapter, write_tiny_model

NAMED = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}> {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
ADDED = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
OTHER = {"bos_token": "<|im_start|>", "eos_token": ADDED}
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi <|im_end|> ü"}]
#: base's template and tokens, adapter's template file, adapter's tokenizer_config.json
CASES = {
    "a template file": (PLAIN, None, {"bos_token": "<|endoftext|>"}),
    "a template that names tokens": (NAMED, None, OTHER),
    "a template in the config": (None, None, {**OTHER, "chat_template": NAMED}),
    "named templates": (
        None, None, {**OTHER, "chat_template": [{"name": "default", "template": NAMED}]},
    ),
    "the base's template, other tokens": (NAMED, NAMED, OTHER),
    "the base's template and tokens": (
        NAMED, NAMED, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    ),
}  # fmt: skip


def folders(root: Path, case: str) -> tuple[Path, Path]:
    own, of_base, config = CASES[case]
    base = write_tiny_model(root / TINY_NAME)
    if of_base is not None:
        tokens = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
        text = json.dumps({**tokens, "chat_template": of_base})
        (base / "tokenizer_config.json").write_text(text)
    adapter = write_tiny_adapter(root / "a", seed=1)
    shutil.copy(base / "tokenizer.json", adapter)
    (adapter / "tokenizer_config.json").write_text(json.dumps(config))
    if own is not None:
        (adapter / "chat_template.jinja").write_text(own)
    return base, adapter


def checked(base: Path, adapter: Path) -> CheckedAdapter:
    return check_adapter(read_folder(adapter).files, read_base_folder(base, TINY_NAME)[0])


def ref_of(adapter: CheckedAdapter) -> AdapterRef:
    manifest = adapter.manifest
    return AdapterRef(
        "a", 1, manifest.digest, chat_template=manifest.chat_template,
        template_tokens=token_pairs(manifest.template_tokens),
        eos_token_ids=manifest.eos_token_ids,
    )  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def reader(tmp_path: Path, case: str) -> AsyncIterator[PromptReader]:
    base, _ = folders(tmp_path, case)
    reader = PromptReader(ModelText.load(base))
    yield reader
    await reader.close()


@pytest.mark.parametrize("opens", [True, False])
async def test_prompt_ids_equal_apply_chat_template_of_the_adapters_tokenizer(
    reader: PromptReader, tmp_path: Path, case: str, opens: bool
) -> None:
    base, adapter = tmp_path / TINY_NAME, tmp_path / "a"
    request = engine_pb2.GenerateRequest(
        chat=engine_pb2.ChatMessages(
            messages=[engine_pb2.ChatMessage(**message) for message in CHAT],
            add_generation_prompt=opens,
        )
    )
    prompt = await reader.read(request, ref_of(checked(base, adapter)))
    oracle = AutoTokenizer.from_pretrained(adapter)
    expected = oracle.apply_chat_template(
        CHAT, tokenize=True, add_generation_prompt=opens, return_dict=False
    )
    assert list(prompt.token_ids) == expected
    if case != "the base's template and tokens":
        assert list((await reader.read(request, None)).token_ids) != expected


def test_only_what_differs_from_the_base_is_part_of_the_version(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path / "a", "a template that names tokens")
    config = checked(base, adapter).manifest.config
    assert config["chat_template"] == NAMED
    assert config["template_tokens"] == {
        "bos_token": "<|im_start|>", "eos_token": "<|endoftext|>",
    }  # fmt: skip
    assert config["eos_token_ids"] == [256, 258]
    base, adapter = folders(tmp_path / "b", "the base's template and tokens")
    config = checked(base, adapter).manifest.config
    assert "chat_template" not in config
    assert "eos_token_ids" not in config
