"""A merged checkpoint: transformers loads it, and its logits are those that were served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine_svc.cli.main import main as enginectl
from engine_svc.types import NO_SLOT, SamplingParams
from tests.support.coverage import BASES, COVERAGE, VOCABULARY, CoverageCase
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.oracle import Oracle, write_checkpoint, write_fused_twin, write_peft_adapter
from tests.support.tiny_adapters import tokenizer_json

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

TOLERANCE = 1e-4
GREEDY = SamplingParams(max_tokens=64, seed=0, temperature=0.0)
PROMPT = [5, 80, 3, 99, 12, 64, 7]
#: what can be folded: every option once, biases with and without a place in the config
CASES = [
    case
    for case in (*COVERAGE, *VOCABULARY)
    if not case.keys
    and not case.written
    and case.dtype == "float32"
    and case.option != "r"
    # no architecture has a bias of its output head
    and (case.option, case.what) != ("lora_bias", "lm_head")
]


def base_of(case: CoverageCase, root: Path, *, tied: bool = False, fused: bool = False) -> Path:
    architecture, changes = BASES[case.base]
    if tied:
        changes = {**changes, "tie_word_embeddings": True, "max_shard_size": "60KB"}
    folder = write_checkpoint(root / "base", architecture, seed=3, **dict(changes))
    if fused:
        folder = write_fused_twin(folder, root / "fused")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return folder


def adapter_of(case: CoverageCase, base: Path, root: Path) -> Path:
    model = write_fused_twin(base, root / "twin") if case.fused else base
    copies = "auto" if case.copies else False
    return write_peft_adapter(
        model, root / "adapter", seed=1, save_embedding_layers=copies, **dict(case.config)
    )


def merge(adapter: Path, base: Path, out: Path, *flags: str) -> int:
    confirmed = "--base-model-confirmed"
    return enginectl(
        ["merge", str(adapter), "--model", str(base), "--out", str(out), confirmed, *flags]
    )


def assert_serves(out: Path, expected: torch.Tensor) -> None:
    """transformers and our engine, as a plain base."""
    theirs = Oracle(out).logits(PROMPT, None)
    assert (theirs - expected).abs().max() <= TOLERANCE
    run = DirectRunner(out, arena_bytes=1 << 20)
    run.record_logits()
    sequence = SeatedSequence(0, NO_SLOT, list(PROMPT), GREEDY)
    run.generate([sequence], 1)
    assert (sequence.logits[0] - expected[-1]).abs().max() <= TOLERANCE
    run.close()


@pytest.mark.parametrize(
    ("case", "tied"),
    [*((case, False) for case in CASES), *((case, True) for case in VOCABULARY if case in CASES)],
    ids=lambda value: value.name if isinstance(value, CoverageCase) else "",
)
def test_a_merged_checkpoint_gives_the_adapters_logits(
    case: CoverageCase, tied: bool, tmp_path: Path
) -> None:
    base = base_of(case, tmp_path, tied=tied)
    adapter = adapter_of(case, base, tmp_path)
    trained_on = tmp_path / "twin" if case.fused else base
    expected = Oracle(trained_on, {"a": adapter}).logits(PROMPT, "a")
    assert (Oracle(base).logits(PROMPT, None) - expected).abs().max() > 30 * TOLERANCE
    assert merge(adapter, base, tmp_path / "out") == 0
    assert_serves(tmp_path / "out", expected)


@pytest.mark.parametrize("modules", [["qkv_proj", "gate_up_proj"], ["o_proj", "lm_head"]])
def test_a_fused_base_stays_fused(modules: list[str], tmp_path: Path) -> None:
    case = CoverageCase("", "", {"r": 3, "target_modules": modules}, copies=False)
    base = base_of(case, tmp_path, fused=True)
    adapter = adapter_of(case, base, tmp_path)
    expected = Oracle(base, {"a": adapter}).logits(PROMPT, "a")
    assert merge(adapter, base, tmp_path / "out") == 0
    assert_serves(tmp_path / "out", expected)
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "weights that others than their writer cannot read"


def test_a_tied_base_is_untied_only_by_an_adapter_of_its_vocabulary(tmp_path: Path) -> None:
    plain = CoverageCase("", "", {"r": 3, "target_modules": ["q_proj"]})
    base = base_of(plain, tmp_path, tied=True)
    assert merge(adapter_of(plain, base, tmp_path / "a"), base, tmp_path / "plain") == 0
    head = CoverageCase("", "", {"r": 3, "target_modules": ["lm_head"]}, copies=False)
    assert merge(adapter_of(head, base, tmp_path / "b"), base, tmp_path / "head") == 0
    tied = {
        name: json.loads((tmp_path / name / "config.json").read_text())["tie_word_embeddings"]
        for name in ("plain", "head")
    }
    assert tied == {"plain": True, "head": False}


@pytest.mark.parametrize(
    ("module", "of"),
    [
        ("o_proj", "with biases on q, k, v"),
        ("lm_head", "with biases on q, k, v"),
        ("lm_head", "with biases"),
    ],
)
def test_a_bias_without_a_place_in_the_architecture_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], module: str, of: str
) -> None:
    config = {"r": 3, "target_modules": [module], "lora_bias": True}
    case = CoverageCase("", "", config, base=of)
    base = base_of(case, tmp_path)
    assert merge(adapter_of(case, base, tmp_path), base, tmp_path / "out") == 4
    assert module in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapters_template_and_end_tokens_go_with_it(tmp_path: Path) -> None:
    case = CoverageCase("", "", {"r": 3, "target_modules": ["q_proj"]})
    base = base_of(case, tmp_path)
    adapter = adapter_of(case, base, tmp_path)
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    (adapter / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    out = tmp_path / "out"
    assert merge(adapter, base, out, "--dtype", "bfloat16") == 0
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 2]
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    run = DirectRunner(out, arena_bytes=1 << 20)
    assert run.loaded.base.dtype == "bfloat16"
    run.close()


def test_an_output_folder_with_anything_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    assert merge(tmp_path, tmp_path, out) == 2
    assert "--out" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine"]
