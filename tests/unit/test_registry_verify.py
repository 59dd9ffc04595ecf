"""`registryctl verify` against a base model's folder: what it prints, and its exit codes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from engine_svc.adapters.packer import plan_packing
from engine_svc.layout import adapter_layout, smallest_page_size
from loraplex.adapter_format import check_adapter, read_folder
from registry_svc.cli.main import main as registryctl
from tests.support.tiny_adapters import (
    BASE_NAME,
    CONFIG,
    adapter_tensors,
    base_of,
    parse_config,
    write_adapter,
    write_base_folder,
)

HEAD = "base_model.model.lm_head"


@pytest.fixture
def base(tmp_path):
    return write_base_folder(tmp_path / BASE_NAME)


def verify(base, adapter, *flags):
    return registryctl(["verify", str(adapter), "--base-model", str(base), *flags])


def saved_head(folder):
    spec = parse_config(CONFIG)
    tensors = adapter_tensors(spec, rank={"q_proj": 4, "v_proj": 2})
    tensors[f"{HEAD}.weight"] = np.ones((64, 32), "float32")
    config = {"modules_to_save": ["lm_head"], "rank_pattern": {"v_proj": 2}}
    return write_adapter(folder, tensors=tensors, config=config)


def test_the_table_has_module_layers_rank_scaling_and_bytes(base, tmp_path, capsys):
    assert verify(base, saved_head(tmp_path / "a")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        ["MODULE", "LAYERS", "RANK", "SCALING", "BYTES"],
        ["q_proj", "0-1", "4", "2", "2048"],
        ["v_proj", "0-1", "2", "4", "768"],
        ["lm_head", "-", "whole", "1", "8192"],
    ]


def test_json_says_the_same_and_what_an_engine_will_need(base, tmp_path, capsys):
    folder = saved_head(tmp_path / "a")
    assert verify(base, folder, "--output", "json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["module"] for row in told["coverage"]] == ["q_proj", "v_proj", "lm_head"]
    facts = base_of(base)
    spec = check_adapter(read_folder(folder).files, facts).spec
    for dtype, field in (("bfloat16", "estimated_gpu_bytes"), ("float32", "estimated_cpu_bytes")):
        layout = adapter_layout(facts.spec, smallest_page_size(facts.spec, dtype), dtype)
        plan = plan_packing(spec.parts, layout, "d")
        assert told[field] == plan.used_bytes
    assert told["chat_template_digest"] is None


def test_a_template_of_its_own_is_named(base, tmp_path, capsys):
    folder = write_adapter(tmp_path / "a")
    assert verify(base, folder) == 0
    assert "chat template  the base model's" in capsys.readouterr().out
    (folder / "chat_template.jinja").write_text("{{ eos_token }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<x>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert verify(base, folder) == 0
    told = capsys.readouterr().out
    assert "the adapter's own, sha256:" in told
    assert "eos_token '<x>'" in told
    assert "end tokens       2, 7" in told


@pytest.mark.parametrize(
    ("flags", "reason", "code"),
    [
        (("--max-saved-bytes", "100"), "ADAPTER_TOO_LARGE", 4),
        (("--max-lora-rank", "3"), "RANK_UNSUPPORTED", 4),
    ],
)
def test_a_refusal_is_one_line_a_code_and_json(base, tmp_path, capsys, flags, reason, code):
    folder = saved_head(tmp_path / "a")
    assert verify(base, folder, *flags) == code
    assert capsys.readouterr().err.startswith(f"registryctl: {reason}: ")
    assert verify(base, folder, *flags, "--output", "json") == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["reason"] == reason
    assert error["metadata"]["limit"] == flags[1]


def test_a_folder_or_base_that_is_not_there_is_no_crash(base, tmp_path, capsys):
    assert verify(base, tmp_path / "nothing") == 4
    empty = tmp_path / "empty"
    empty.mkdir()
    assert verify(empty, write_adapter(tmp_path / "a")) in (3, 4)
    assert "registryctl: " in capsys.readouterr().err
