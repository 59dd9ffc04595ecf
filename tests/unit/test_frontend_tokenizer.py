import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine_svc.frontend.text.model_text import ModelText
from engine_svc.frontend.text.tokenizer import PromptTokenizer
from loraplex.status import BaseModelUnsupported, FieldInvalid

TEXTS = [
    "Hello",
    " leading space",
    "línea\nnueva 你好 🦥",
    "<|im_start|>user\nHi<|im_end|>",
    "12345",
]
FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")


@pytest.fixture
def model_dir(demo_model_dir: Path, tmp_path: Path) -> Path:
    """The demo model without its weights, to change."""
    for name in FILES:
        shutil.copy(demo_model_dir / name, tmp_path / name)
    return tmp_path


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("options", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
def test_prompts_are_encoded_as_transformers_encodes_them(
    options: dict[str, object], model_dir: Path
) -> None:
    change(model_dir / "tokenizer_config.json", **options)
    oracle = AutoTokenizer.from_pretrained(model_dir)
    ours = PromptTokenizer.load(model_dir, 49152)
    for text in TEXTS:
        assert list(ours.encode(text)) == oracle.encode(text)
        plain = oracle.encode(text, add_special_tokens=False)
        assert list(ours.encode(text, special_tokens=False)) == plain


def test_truncation_written_into_the_tokenizer_does_not_cut_prompts(model_dir: Path) -> None:
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    change(model_dir / "tokenizer.json", truncation=cut)
    assert len(PromptTokenizer.load(model_dir, 49152).encode("one two three four")) > 2


def test_a_folder_without_tokenizer_is_refused_by_the_files_name(tmp_path: Path) -> None:
    with pytest.raises(BaseModelUnsupported, match=r"tokenizer\.json.*missing"):
        PromptTokenizer.load(tmp_path, 10)


def test_a_tokenizer_that_cannot_be_read_is_refused(model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{")
    with pytest.raises(BaseModelUnsupported, match=r"tokenizer\.json"):
        PromptTokenizer.load(model_dir, 10)


@pytest.mark.parametrize(("ids", "bad"), [([0, -1], "-1"), ([49152], "49152")])
def test_ids_outside_the_vocabulary_are_refused(
    ids: list[int], bad: str, demo_model_dir: Path
) -> None:
    tokenizer = PromptTokenizer.load(demo_model_dir, 49152)
    with pytest.raises(FieldInvalid) as caught:
        tokenizer.check_ids(ids, "token_ids.ids")
    assert caught.value.metadata["value"] == bad
    assert caught.value.metadata["limit"] == "in 0 … 49151"


def test_a_text_whose_token_has_no_row_in_the_model_is_refused(demo_model_dir: Path) -> None:
    with pytest.raises(FieldInvalid, match="prompt"):
        PromptTokenizer.load(demo_model_dir, 20).encode("Hello")


def test_end_tokens_are_what_the_registry_reads_from_the_same_folder(model_dir: Path) -> None:
    change(model_dir / "generation_config.json", eos_token_id=[5, 0])
    assert ModelText.load(model_dir).eos_token_ids == (0, 5)
    change(model_dir / "generation_config.json", eos_token_id=None)
    assert ModelText.load(model_dir).eos_token_ids == (2,)


@pytest.mark.parametrize(("asked", "got"), [(0, 8192), (100, 100), (10**6, 8192)])
def test_the_context_is_the_smaller_of_setting_and_model(
    asked: int, got: int, model_dir: Path
) -> None:
    assert ModelText.load(model_dir, asked).context_tokens == got


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaseModelUnsupported, match=r"config\.json"):
        ModelText.load(tmp_path)
