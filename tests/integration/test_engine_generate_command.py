"""`enginectl generate`: one process, no registry, the same checks and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_svc.cli.main import main as enginectl
from tests.support.tiny_model import TINY_NAME, write_tiny_adapter, write_tiny_model

FIXED = ("--temperature", "0", "--max-tokens", "12", "--ignore-eos", "--prompt", "once upon")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / TINY_NAME)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_tiny_adapter(folder / name, seed) for seed, name in enumerate("ab", 1)}


def generate(model: Path, *args: str) -> int:
    return enginectl(["generate", "--model", str(model), *args])


def test_base_and_adapters_answer_and_a_summary_names_who_did(
    model: Path, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    both = [arg for folder in adapters.values() for arg in ("--adapter", str(folder))]
    texts = {}
    for use, who in (("a", "a"), ("b", "b"), (TINY_NAME, TINY_NAME), ("", TINY_NAME)):
        assert generate(model, *FIXED, *both, "--use", use) == 0
        printed = capsys.readouterr()
        texts[use] = printed.out
        assert printed.err.startswith(f"{who}: 9 prompt + 12 tokens, load ")
    assert texts[""] == texts[TINY_NAME]
    assert len({texts["a"], texts["b"], texts[""]}) == 3


def test_the_only_adapter_answers_without_being_named(
    model: Path, adapters: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, *FIXED, "--adapter", str(adapters["a"])) == 0
    assert capsys.readouterr().err.startswith("a: ")


def test_chat_is_rendered_by_the_models_template(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(model, *FIXED, "--chat", "--system", "be brief") == 0
    # one token a byte, and one for each of <|im_start|> and <|im_end|>
    texts = ("system\nbe brief\n", "user\nonce upon\n", "assistant\n")
    num_tokens = sum(map(len, texts)) + 5
    assert f"{num_tokens} prompt" in capsys.readouterr().err


def test_several_choices_are_printed_one_after_the_other(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = ("--temperature", "1", "--seed", "3", "--n", "2", "--max-tokens", "8", "--ignore-eos")
    assert generate(model, "--prompt", "x", *hot) == 0
    printed = capsys.readouterr()
    assert "\n--- choice 1\n" in printed.out
    assert "16 tokens" in printed.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--prompt", ""), 2, "PROMPT_EMPTY"),
        (("--prompt", "x" * 2000), 2, "PROMPT_TOO_LONG"),
        (("--prompt", "x", "--max-tokens", "-1"), 2, "max_tokens is -1"),
        (("--prompt", "x", "--stop", ""), 2, "stop"),
        (("--prompt", "x", "--temperature", "-2"), 2, "temperature is -2"),
        (("--prompt", "x", "--use", "nobody"), 3, "--use is 'nobody'; must be one of tiny-llama"),
        (("--prompt", "x", "--adapter", "/nowhere"), 4, "/nowhere"),
    ],
)
def test_errors_are_one_line_with_field_and_limit(
    model: Path, args: tuple[str, ...], code: int, message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert generate(model, *args) == code
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert message in printed


def test_an_adapter_of_another_base_is_refused_unless_confirmed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_adapter(tmp_path / "other", 3, base_model_name_or_path="org/else")
    assert generate(model, *FIXED, "--adapter", str(folder)) == 4
    assert "BASE_MODEL_MISMATCH" in capsys.readouterr().err
    assert generate(model, *FIXED, "--adapter", str(folder), "--base-model-confirmed") == 0


def test_an_adapter_may_call_the_base_by_an_alias_or_by_the_path_given(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_alias = write_tiny_adapter(tmp_path / "hub", 3, base_model_name_or_path="org/else")
    by_path = write_tiny_adapter(tmp_path / "path", 3, base_model_name_or_path=str(model))
    both = ("--adapter", str(by_alias), "--adapter", str(by_path))
    assert generate(model, *FIXED, *both, "--base-model-alias", "org/other") == 4
    assert "org/else" in capsys.readouterr().err
    assert generate(model, *FIXED, *both, "--base-model-alias", "org/else") == 0


def test_a_model_that_is_not_there_is_not_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(Path("/nowhere/model"), "--prompt", "x") == 3
    assert "/nowhere/model" in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_unavailable(capsys: pytest.CaptureFixture[str]) -> None:
    assert enginectl(["state", "--address", "127.0.0.1:1", "--timeout", "2"]) == 6
    told = capsys.readouterr().err
    assert told.startswith("enginectl: UNAVAILABLE: no engine answers at 127.0.0.1:1 (")
    assert told.endswith("; set --address or LORAPLEX_ENGINE_ADDRESS\n")
