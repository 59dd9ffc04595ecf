from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_svc.model.build import ModelOptions, load_model
from engine_svc.model.linear import Linear
from loraplex.status import BaseModelUnsupported, FieldInvalid
from tests.support.tiny_model import CONFIG, write_tiny_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def load(model_dir: Path, **options: Any) -> Any:
    settings = {"arena_bytes": 1 << 22, "device": "cpu", **options}
    return load_model(model_dir, ModelOptions(host_region_path="unused", **settings))


def rewrite(model_dir: Path, change: Any) -> None:
    tensors = load_file(model_dir / WEIGHTS)
    change(tensors)
    save_file(tensors, model_dir / WEIGHTS)


def test_a_loaded_model_tells_its_sizes(model_dir: Path) -> None:
    loaded = load(model_dir, context_tokens=100)
    assert loaded.dtype == "float32"
    assert loaded.page_size == 16
    assert loaded.num_pages == (1 << 22) // loaded.layout.page_bytes
    assert loaded.context_tokens == 100
    parameters = sum(t.numel() for t in load_file(model_dir / WEIGHTS).values())
    head = CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert loaded.weights_bytes == 4 * (parameters + head)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu'; must be auto, cpu or cuda"),
        ({"dtype": "int8"}, "dtype is 'int8'; must be auto, float32"),
        ({"context_tokens": 4096}, "max_model_len is 4096; must be 2 to 1024, or 0 for all"),
        ({"context_tokens": 1}, "max_model_len is 1; must be 2 to 1024"),
        ({"context_tokens": -1}, "max_model_len is -1"),
        ({"page_size": 2}, "page_size is 2; must be at least 16"),
        ({"page_size": 24, "static_buffers": True}, "page_size is 24; must be a power of two"),
        (
            {"max_num_batched_tokens": 65536, "static_buffers": True},
            "max_num_batched_tokens is 65536; must be at most 65535 on a GPU",
        ),
        ({"arena_bytes": 4095}, "arena_bytes is 4095; must be at least one page"),
    ],
)
def test_options_outside_their_limits_name_field_value_and_limit(
    model_dir: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FieldInvalid) as refused:
        load(model_dir, **options)
    assert message in str(refused.value)
    assert refused.value.reason == "CONFIG_INVALID"


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    rewrite(model_dir, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        BaseModelUnsupported, match=r"missing.*model\.layers\.1\.mlp\.up_proj\.weight"
    ):
        load(model_dir)


def test_an_unknown_tensor_is_named(model_dir: Path) -> None:
    rewrite(model_dir, lambda t: t.update({"vision_tower.weight": torch.zeros(2)}))
    with pytest.raises(BaseModelUnsupported, match=r"unknown tensors.*vision_tower\.weight"):
        load(model_dir)


def test_a_wrong_shape_is_named(model_dir: Path) -> None:
    rewrite(model_dir, lambda t: t.update({"model.norm.weight": torch.ones(65)}))
    with pytest.raises(BaseModelUnsupported, match=r"model\.norm\.weight is \(65,\).*\(64,\)"):
        load(model_dir)


def test_derived_buffers_and_a_copy_of_a_tied_head_are_not_needed(model_dir: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(model_dir, add)
    assert load(model_dir).base.tied_embeddings


def test_pickled_weights_alone_are_refused_with_the_way_out(model_dir: Path) -> None:
    (model_dir / WEIGHTS).rename(model_dir / "pytorch_model.bin")
    with pytest.raises(BaseModelUnsupported, match=r"pytorch_model\.bin.*save_pretrained"):
        load(model_dir)


def test_a_truncated_weight_file_is_refused(model_dir: Path) -> None:
    data = (model_dir / WEIGHTS).read_bytes()
    (model_dir / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(BaseModelUnsupported, match=r"model\.safetensors"):
        load(model_dir)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model.norm.weight": "gone.safetensors"}, "gone.safetensors"),
        ({"model.norm.weight": "../model.safetensors"}, "../model.safetensors"),
        ({"no.such.weight": WEIGHTS}, "no.such.weight"),
        ("nonsense", "weight_map"),
    ],
)
def test_an_index_that_points_nowhere_is_refused(model_dir: Path, files: Any, message: str) -> None:
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(BaseModelUnsupported) as refused:
        load(model_dir)
    assert message in str(refused.value)


def test_a_folder_without_config_is_refused(model_dir: Path) -> None:
    (model_dir / "config.json").unlink()
    with pytest.raises(BaseModelUnsupported, match=r"config\.json is 'No such file"):
        load(model_dir)


def test_an_unsupported_architecture_is_named(model_dir: Path) -> None:
    config = {**CONFIG, "architectures": ["MambaForCausalLM"]}
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(BaseModelUnsupported, match="MambaForCausalLM"):
        load(model_dir)


def test_a_loaded_model_keeps_no_file_of_its_folder_open_or_mapped(model_dir: Path) -> None:
    loaded = load(model_dir)
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [path for path in opened if path.startswith(str(model_dir))]
    assert str(model_dir) not in Path("/proc/self/maps").read_text()
    assert loaded.weights_bytes > 0


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_linear_equals_the_plain_one(rows: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(37, 23, generator=generator)
    bias = torch.randn(37, generator=generator) if with_bias else None
    x = torch.randn(rows, 23, generator=generator)
    found = Linear(weight, bias)(x)
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    assert torch.allclose(found.double(), expected, atol=1e-4)
