"""Where weights come from: a checkpoint through staging buffers, or random numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_svc.model.build import _read_base
from engine_svc.model.dummy import DummyWeights
from engine_svc.model.weight_staging import Staging
from engine_svc.model.weights import DUMMY, load_weights
from engine_svc.types import NO_SLOT, SamplingParams
from loraplex.base_folder import read_base_folder
from loraplex.status import BaseModelUnsupported
from tests.support.direct_runner import DirectRunner, SeatedSequence
from tests.support.tiny_model import CONFIG, write_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("shape", [(7, 3), (1,), (64, 33), ()])
@pytest.mark.parametrize("chunk_bytes", [16, 64, 1 << 20])
def test_staged_copy_equals_its_source_whatever_the_chunks(
    shape: tuple[int, ...], chunk_bytes: int
) -> None:
    source = torch.randn(shape)
    target = torch.full(shape, torch.nan)
    Staging(CPU, chunk_bytes, num_buffers=2).copy(source, target)
    assert torch.equal(target, source)


def test_staging_takes_sources_that_are_not_contiguous() -> None:
    source = torch.randn(6, 8).T
    target = torch.full((8, 6), torch.nan)
    Staging(CPU, 40).copy(source, target)
    assert torch.equal(target, source)


def test_fused_weights_are_the_checkpoint_s_rows_in_order(model_dir: Path) -> None:
    stored = load_file(model_dir / "model.safetensors")
    weights = load_weights(model_dir, _read_base(model_dir), torch.bfloat16, CPU)
    prefix = "model.layers.1.self_attn"
    names = [f"{prefix}.{part}_proj.weight" for part in "qkv"]
    expected = torch.cat([stored[name] for name in names]).to(torch.bfloat16)
    assert torch.equal(weights.layers[1].qkv.plain_weight(), expected)
    assert weights.embedding.dtype == torch.float32


def test_dummy_weights_have_the_sizes_of_a_checkpoint_and_need_only_a_config(
    model_dir: Path, config_only: Path
) -> None:
    base = _read_base(config_only)
    real = load_weights(model_dir, base, torch.float32, CPU)
    made = load_weights(config_only, base, torch.float32, CPU, DUMMY)
    assert made.num_bytes == real.num_bytes
    for ours, theirs in zip(made.layers, real.layers, strict=True):
        for one, other in zip(ours.sites, theirs.sites, strict=True):
            assert one.plain_weight().shape == other.plain_weight().shape
    with pytest.raises(BaseModelUnsupported, match="no weights"):
        load_weights(config_only, base, torch.float32, CPU)


def test_dummy_tensors_are_the_same_each_time_and_differ_by_name_and_seed() -> None:
    def read(name: str, seed: int = 0) -> torch.Tensor:
        out = torch.full((32, 16), torch.nan)
        DummyWeights(torch.float32, seed).read(name, out)
        return out

    first = read("model.layers.0.mlp.up_proj.weight")
    assert torch.equal(first, read("model.layers.0.mlp.up_proj.weight"))
    assert not torch.equal(first, read("model.layers.1.mlp.up_proj.weight"))
    assert not torch.equal(first, read("model.layers.0.mlp.up_proj.weight", seed=1))
    assert first.std().item() == pytest.approx(16**-0.5, rel=0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_dummy_weights_samples_finite_tokens(config_only: Path, dtype: str) -> None:
    deep = {**CONFIG, "num_hidden_layers": 24}
    (config_only / "config.json").write_text(json.dumps(deep))
    runner = DirectRunner(
        config_only, device="cpu", dtype=dtype, load_format="dummy", arena_bytes=1 << 22
    )
    sampling = SamplingParams(max_tokens=4, seed=0, temperature=0.0)
    sequence = SeatedSequence(0, NO_SLOT, list(range(40)), sampling)
    runner.generate([sequence], 4)
    runner.close()
    # −1 is the sampler's word for logits that are not finite
    assert all(0 <= token < CONFIG["vocab_size"] for token in sequence.outputs)


def test_the_digest_of_dummy_weights_is_of_the_config_and_no_checkpoint_s(model_dir: Path) -> None:
    real = read_base_folder(model_dir, "tiny")[2]
    (model_dir / "model.safetensors").unlink()
    first = read_base_folder(model_dir, "tiny", dummy_weights=True)[2]
    assert re.fullmatch("sha256:[0-9a-f]{64}", first)
    assert first != real
    (model_dir / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 1e6}))
    assert read_base_folder(model_dir, "tiny", dummy_weights=True)[2] != first
