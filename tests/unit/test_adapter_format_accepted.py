"""What `check_adapter` accepts, and what it says of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from loraplex.adapter_format import check_adapter, parse_manifest, read_folder
from loraplex.base_model import LAYER_MODULES
from tests.support.tiny_adapters import (
    adapter_tensors,
    base_of,
    tiny_base,
    tokenizer_json,
    write_adapter,
    write_base_folder,
)

BASE = tiny_base()


def checked(folder: Path, base=BASE, **options):
    return check_adapter(read_folder(folder).files, base, **options)


def test_plain_adapter_is_described_completely(tmp_path):
    result = checked(write_adapter(tmp_path / "a"))
    spec = result.spec
    assert [(t.layer, t.module, t.rank, t.scaling) for t in spec.targets] == [
        (0, "q_proj", 4, 2.0), (0, "v_proj", 4, 2.0), (1, "q_proj", 4, 2.0), (1, "v_proj", 4, 2.0),
    ]  # fmt: skip
    assert spec.max_rank == 4
    assert spec.parameter_count == 2 * 4 * ((32 + 32) + (32 + 16))
    assert spec.weights_bytes == spec.parameter_count * 4
    rows = [(row.module, row.layers, row.rank, row.scaling) for row in result.report.rows]
    assert rows == [("q_proj", "0-1", 4, 2.0), ("v_proj", "0-1", 4, 2.0)]
    assert sum(row.num_bytes for row in result.report.rows) == spec.weights_bytes


def test_manifest_reads_back_with_the_same_digest_and_options(tmp_path):
    manifest = checked(write_adapter(tmp_path / "a", config={"use_rslora": True})).manifest
    again = parse_manifest(manifest.canonical_json)
    assert again == manifest
    assert again.options.use_rslora
    assert [file.name for file in again.files] == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip


def test_order_of_target_modules_does_not_change_the_manifest_config(tmp_path):
    one = checked(write_adapter(tmp_path / "a", config={"target_modules": ["v_proj", "q_proj"]}))
    two = checked(write_adapter(tmp_path / "b", config={"target_modules": ["q_proj", "v_proj"]}))
    assert one.manifest.config == two.manifest.config


def test_rslora_scales_by_the_root_of_the_rank(tmp_path):
    result = checked(write_adapter(tmp_path / "a", config={"use_rslora": True}))
    assert result.spec.targets[0].scaling == pytest.approx(8 / math.sqrt(4))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_training_dtype_is_read(tmp_path, dtype):
    result = checked(write_adapter(tmp_path / "a", dtype=dtype, modules=LAYER_MODULES))
    assert len(result.spec.targets) == 14
    assert result.spec.targets[0].a.dtype == dtype


@pytest.mark.parametrize(
    "prefix", ["base_model.model.", "", "module.base_model.model.", "base_model.model._orig_mod."]
)
def test_key_prefixes_of_trainers_are_understood(tmp_path, prefix):
    tensors = adapter_tensors(BASE.spec, prefix=prefix)
    assert len(checked(write_adapter(tmp_path / "a", tensors=tensors)).spec.targets) == 4


def test_adapter_name_inside_keys_is_understood(tmp_path):
    tensors = {
        key.replace(".weight", ".default.weight"): value
        for key, value in adapter_tensors(BASE.spec).items()
    }
    assert len(checked(write_adapter(tmp_path / "a", tensors=tensors)).spec.targets) == 4


def test_text_half_of_a_larger_model_keeps_its_own_names_for_patterns(tmp_path):
    tensors = {
        key.replace("model.layers", "model.language_model.layers"): value
        for key, value in adapter_tensors(BASE.spec, rank={"q_proj": 4, "v_proj": 2}).items()
    }
    config = {
        "target_modules": r"model\.language_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)",
        "rank_pattern": {r"^model\.language_model\.layers\.\d+\.self_attn\.v_proj": 2},
    }
    result = checked(write_adapter(tmp_path / "a", tensors=tensors, config=config))
    assert {(t.module, t.rank) for t in result.spec.targets} == {("q_proj", 4), ("v_proj", 2)}


def test_rank_and_alpha_patterns_take_the_first_that_matches(tmp_path):
    tensors = adapter_tensors(BASE.spec, rank={"q_proj": 4, "v_proj": 2})
    config = {
        "rank_pattern": {"v_proj": 2, "layers.0.self_attn.v_proj": 99},
        "alpha_pattern": {"layers.0.self_attn.v_proj": 6, "v_proj": 10},
    }
    result = checked(write_adapter(tmp_path / "a", tensors=tensors, config=config))
    scalings = {(t.layer, t.module): t.scaling for t in result.spec.targets}
    assert scalings[0, "v_proj"] == 3.0
    assert scalings[1, "v_proj"] == 5.0
    assert scalings[0, "q_proj"] == 2.0


@pytest.mark.parametrize(
    "config",
    [
        {"layers_to_transform": [1]},
        {"layers_to_transform": 1, "layers_pattern": "layers"},
        {"target_modules": r".*layers\.1\..*(q_proj|v_proj)"},
        {"exclude_modules": r"model\.layers\.0\..*"},
        {"target_modules": ["layers.1.self_attn.q_proj", "layers.1.self_attn.v_proj"]},
    ],
)
def test_some_layers_only(tmp_path, config):
    folder = write_adapter(tmp_path / "a", layers=[1], config=config)
    assert [(t.layer, t.module) for t in checked(folder).spec.targets] == [
        (1, "q_proj"), (1, "v_proj"),
    ]  # fmt: skip


def test_all_linear_means_every_linear_layer_but_the_head(tmp_path):
    folder = write_adapter(
        tmp_path / "a", modules=LAYER_MODULES, config={"target_modules": "all-linear"}
    )
    assert len(checked(folder).spec.targets) == 14


def test_alias_or_confirmation_stand_for_the_base_name(tmp_path):
    alias = write_adapter(tmp_path / "a", config={"base_model_name_or_path": "org/tiny"})
    other = write_adapter(tmp_path / "b", config={"base_model_name_or_path": "org/other"})
    assert checked(alias).spec.max_rank == 4
    assert checked(other, base_model_confirmed=True).spec.max_rank == 4


def test_trainer_leftovers_are_listed_and_never_opened(tmp_path):
    folder = write_adapter(tmp_path / "a")
    for name in ("training_args.bin", "optimizer.pt", "README.md", ".gitattributes"):
        (folder / name).write_text("x")
        (folder / name).chmod(0)
    (folder / "checkpoint-100").mkdir()
    read = read_folder(folder)
    assert [file.name for file in read.stored] == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    assert {name for name, _ in read.not_stored} == {
        "training_args.bin", "optimizer.pt", "README.md", ".gitattributes", "checkpoint-100",
    }  # fmt: skip


def test_hub_cache_links_into_the_same_repository_are_followed(tmp_path):
    repository = tmp_path / "models--org--a"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "abc"
    source = write_adapter(tmp_path / "source")
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        file.rename(blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob-{file.name}")
    assert checked(snapshot).spec.max_rank == 4


def test_same_tokenizer_adds_nothing_and_own_template_and_eos_are_content(tmp_path):
    base_folder = write_base_folder(tmp_path / "base")
    base = base_of(base_folder)
    folder = write_adapter(tmp_path / "a")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((base_folder / name).read_bytes())
    plain = checked(folder, base)
    assert plain.spec.chat_template is None
    assert plain.spec.eos_token_ids is None
    (folder / "chat_template.jinja").write_text("{{ own }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    own = checked(folder, base)
    assert own.spec.chat_template == own.manifest.chat_template == "{{ own }}"
    assert own.spec.eos_token_ids == own.manifest.eos_token_ids == (2, 7)


def test_own_eos_token_joins_the_eos_ids_of_the_base(tmp_path):
    base = base_of(write_base_folder(tmp_path / "base"))
    folder = write_adapter(tmp_path / "a")
    tokenizer = tokenizer_json()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": chr(0x4E00 + 9)}))
    assert checked(folder, base).spec.eos_token_ids == (2, 9)
