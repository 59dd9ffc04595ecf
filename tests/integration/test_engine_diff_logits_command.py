"""`enginectl diff-logits` and `enginectl merge`: for a folder, and for a registered name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_svc.cli import peft_logits
from engine_svc.cli.diff_logits import compare
from engine_svc.cli.main import main as enginectl
from registry_svc.cli.main import main as registryctl
from tests.support.registry_service import running_registry, sqlite_url
from tests.support.tiny_model import TINY_NAME, write_tiny_adapter, write_tiny_model

PROMPT = ("--prompt", "once upon a time")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / TINY_NAME)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_tiny_adapter(tmp_path / "a", seed=1)


def told(
    capsys: pytest.CaptureFixture[str], adapter: Path | str, model: Path, *flags: str
) -> dict[str, Any]:
    flags = (*PROMPT, "--output", "json", *flags)
    assert enginectl(["diff-logits", str(adapter), "--model", str(model), *flags]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("chat", [(), ("--chat",)])
def test_what_is_served_is_what_peft_computes(
    model: Path, adapter: Path, capsys: pytest.CaptureFixture[str], chat: tuple[str, ...]
) -> None:
    found = told(capsys, adapter, model, "--tokens", "6", *chat)
    assert found["largest_difference"] < 1e-4
    assert found["adapter_effect"] > 1e-2
    assert found["positions"] == found["prompt_tokens"] + 5
    assert found["first_differing"] is None
    assert (found["prompt_tokens"] == 16) == (chat == ())


def test_a_wrong_strength_is_shown_with_both_tokens_and_margins(
    model: Path, adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT is given other weights than the engine: what a wrong server would do."""
    stronger = adapter.parent / "stronger"
    stronger.mkdir()
    for file in adapter.iterdir():
        (stronger / file.name).write_bytes(file.read_bytes())
    weights = stronger / "adapter_model.safetensors"
    save_file({name: 3 * tensor for name, tensor in load_file(weights).items()}, weights)
    load = peft_logits.PeftLogits.__init__
    monkeypatch.setattr(
        peft_logits.PeftLogits, "__init__", lambda self, base, _: load(self, base, stronger)
    )
    found = told(capsys, adapter, model)
    assert found["largest_difference"] > 1e-1
    assert found["served"]["token_id"] != found["peft"]["token_id"]
    assert min(found["served"]["margin"], found["peft"]["margin"]) > 0
    assert enginectl(["diff-logits", str(adapter), "--model", str(model), *PROMPT]) == 0
    text = capsys.readouterr().out
    assert f"differ first at position {found['first_differing']}" in text


def test_differences_are_found_where_they_are() -> None:
    peft = torch.tensor([[1.0, 2.0, 0.0], [5.0, 1.0, 0.0], [0.0, 1.0, 3.0]])
    served = peft.clone()
    served[1] = torch.tensor([5.0, 1.5, 0.0])
    served[2] = torch.tensor([0.0, 3.25, 3.0])
    largest, at, first, ours, theirs = compare(served, peft, lambda ids: f"<{ids[0]}>")
    assert (largest, at, first) == (2.25, 2, 2)
    assert ours is not None
    assert theirs is not None
    assert (ours.token_id, ours.text, ours.margin) == (1, "<1>", 0.25)
    assert (theirs.token_id, theirs.margin) == (2, 2.0)


def test_a_registered_name_means_the_files_of_its_version(
    model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = (tmp_path / "blobs").as_uri()
    with running_registry(tmp_path, sqlite_url(tmp_path), store) as registry:
        at = ("--address", registry.address)
        assert registryctl(["base-model", "add", TINY_NAME, "--from", str(model), *at]) == 0
        assert registryctl(["register", "mine", str(adapter), "--base-model", TINY_NAME, *at]) == 0
        capsys.readouterr()
        where = ("--registry-address", registry.address, "--blob-store", store)
        by_name = told(capsys, "mine", model, *where)
        out = tmp_path / "out"
        merged = ["merge", "mine", "--model", str(model), "--out", str(out), *where]
        assert enginectl(merged) == 0
        missing = ["merge", "nobody", "--model", str(model), "--out", str(tmp_path / "o"), *where]
        assert enginectl(missing) == 3
    capsys.readouterr()
    by_folder = told(capsys, adapter, model)
    assert {**by_name, "adapter": ""} == {**by_folder, "adapter": ""}
    assert (out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--tokens", "-1"), 2, "--tokens"),
        (("--prompt", ""), 2, "PROMPT_EMPTY"),
        (("--dtype", "int8"), 2, "dtype"),
    ],
)
def test_bad_arguments_are_one_line(
    model: Path, adapter: Path, capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...], code: int, message: str,
) -> None:  # fmt: skip
    flags = [*PROMPT, *args]
    assert enginectl(["diff-logits", str(adapter), "--model", str(model), *flags]) == code
    assert message in capsys.readouterr().err


def test_without_peft_the_extra_is_named(
    model: Path, adapter: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(peft_logits.importlib, "import_module", missing)
    assert enginectl(["diff-logits", str(adapter), "--model", str(model), *PROMPT]) == 4
    assert "loraplex[engine,compare]" in capsys.readouterr().err
