"""`bench-step` on a CPU with a tiny shape, and what it makes its numbers from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.shared import core_drive
from benchmarks.shared.goals import goals_of
from benchmarks.shared.made_adapters import BASE_8B
from benchmarks.shared.made_models import CONFIG_TINY, SHAPES, write_model_folder
from benchmarks.shared.packed_adapters import AdapterRegion
from benchmarks.shared.random_files import RandomNumbers, write_safetensors
from benchmarks.step import __main__ as step
from benchmarks.step import checks
from benchmarks.step.cases import FULL, MIXED, Case, even, fragmented
from benchmarks.step.floor import StepFloor
from engine_svc import compose
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.layout import adapter_layout
from engine_svc.packed import check_packed, decode_header
from loraplex.base_model import parse_config


@pytest.mark.parametrize("way", [[], ["--static-buffers"]])
def test_dry_run_measures_every_part_and_finds_no_wrong_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: list[str]
) -> None:
    arguments = ["--shape", "tiny", "--device", "cpu", "--arena-gib", "0.06", "--quick", *way]
    parts = [word for part in step.PARTS for word in ("--only", part)]
    assert step.main([*arguments, *parts, "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    (path,) = tmp_path.glob("*/step-tiny.jsonl")
    rows = {row["case"]: row for row in map(json.loads, path.read_text().splitlines())}
    for case in ("TPOT, batch 4, 4 adapters", "tax of 8 tokens as 8 × 1, rank 16",
                 "prefill throughput, 2 adapters / base", "8 places / 4", "shards to the device",
                 "step through the core, batch 4, 4 adapters"):  # fmt: skip
        assert rows[case]["value"] > 0, case
    assert 0 < rows["TPOT, batch 4, base"]["floor"] < rows["TPOT, batch 4, 4 adapters"]["floor"]


def test_full_size_has_a_row_for_every_goal() -> None:
    titles = {case.title for case in (*FULL.cases, *FULL.fragments)}
    names = [case.name for case in FULL.fragments]
    rows = titles | {f"tax of {name}" for name in names} | {
        f"tax of {name}, beyond its bytes" for name in names
    }  # fmt: skip
    rows |= {f"prefill throughput, {n} adapters / base" for n in FULL.prefill[1]}
    rows |= {"prefill throughput, 1 adapter / base", "16 GB of shards to the device"}
    rows |= {f"{FULL.max_loras[1]} places / {FULL.max_loras[0]}"}
    assert goals_of("step").keys() <= rows
    for case in (*FULL.cases, *FULL.fragments, *FULL.core):
        assert len(case.groups) <= len(FULL.ranks[case.ranks])
        assert not case.groups or sum(case.groups) == case.batch


def test_case_gives_each_sequence_its_adapter_s_slot() -> None:
    assert even(5, 2).slots([7, 9, 11]) == [7, 7, 7, 9, 9]
    assert even(2, 0).slots([7]) == [-1, -1]
    assert [case.groups for case in fragmented(32)[:3]] == [(32,), (20, 8, 4), (1,) * 32]


def test_floor_counts_weights_kv_and_each_adapter_once() -> None:
    floor = StepFloor(bytes_per_s=100.0, weights_bytes=1000, kv_token_bytes=2)
    assert floor.num_bytes([10, 20], [5, 6]) == 1000 + 60 + 11
    assert floor.seconds([10], [80]) == pytest.approx(11.0)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (((1, 2), (3, 4), (5, 6)), []),
        (((1, 2), (3, -1), (5, 6)), ["logits were not finite"]),
        (((1, 2), (1, 2), (5, 6)), ["3 adapters gave 2 different answers"]),
    ],
)
def test_wrong_answers_are_named(tokens: tuple[tuple[int, ...], ...], said: list[str]) -> None:
    found = checks.problems("case", [-1, 4, 5], tokens)
    assert [one.removeprefix("case: ") for one in found] == said


def test_adapter_without_effect_is_named() -> None:
    found = checks.without_effect((1, 2), "case", {-1: (1, 2), 3: (1, 2), 4: (2, 2)})
    assert found == ["case: slot 3 answers as the base"]


def test_packed_adapters_of_the_8b_shape_are_whole_and_differ(tmp_path: Path) -> None:
    layout = adapter_layout(BASE_8B.spec, 16, "bfloat16")
    region = AdapterRegion(tmp_path / "region", BASE_8B.spec, layout)
    adapters = region.write((1, 2, 1))
    data = (tmp_path / "region").read_bytes()
    images = []
    for adapter, rank in zip(adapters, (1, 2, 1), strict=True):
        span = adapter.span
        packed = memoryview(data)[span.offset : span.offset + span.num_bytes]
        header = decode_header(packed, layout.digest)
        check_packed(packed, header, layout)
        assert header.digest == adapter.ref.digest
        assert int(header.arrays["rank"].max()) == rank
        images.append(bytes(packed[header.image_offset : header.image_offset + 4096]))
    assert len(set(images)) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_safetensors_hold_normal_numbers(tmp_path: Path, dtype: str) -> None:
    shapes = {"a": (33, 5), "b": (7,)}
    write_safetensors(tmp_path / "x.safetensors", shapes, RandomNumbers.normal(dtype, 0.5))
    tensors = load_file(tmp_path / "x.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert tensors["a"].dtype == getattr(torch, dtype)
    assert tensors["a"].float().std().item() == pytest.approx(0.5, rel=0.2)
    assert np.isfinite(tensors["b"].float().numpy()).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_made_tokenizer_has_a_text_for_every_token(tmp_path: Path, shape: str) -> None:
    folder = write_model_folder(tmp_path / shape, SHAPES[shape])
    text = ModelText.load(folder, 0)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocab) == parse_config(dict(SHAPES[shape])).vocab_size
    assert text.context_tokens == SHAPES[shape]["max_position_embeddings"]


def test_slots_a_place_are_the_engine_s() -> None:
    assert core_drive.SLOTS_A_PLACE == compose.SLOTS_A_PLACE


def test_case_titles_name_ranks_only_where_they_are_not_16() -> None:
    assert Case(4, (1, 3), MIXED).title == "TPOT, batch 4, 2 adapters, ranks 8/16/64"
    assert Case(4, (4,)).title == "TPOT, batch 4, 1 adapter"
    assert CONFIG_TINY["vocab_size"] > 256
