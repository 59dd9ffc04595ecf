"""Base model folders and configurations: what is read, and what is refused with its fix."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loraplex import base_folder
from loraplex.base_folder import find_base_folder, read_base_folder, weights_digest
from loraplex.base_model import module_path, parse_config, parse_config_json
from loraplex.status import BaseModelUnsupported, NotFound
from tests.support.tiny_adapters import CONFIG, write_base_folder

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_old_and_new_style_configurations_mean_the_same():
    old = {**CONFIG, "rope_theta": 5e5, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"}
    new = {**CONFIG, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "dtype": "bfloat16"}
    del old["dtype"]
    assert parse_config(old) == parse_config(new)
    assert parse_config(new).rope_theta == 5e5
    assert parse_config(CONFIG).rope_scaling == {}


def test_shapes_of_every_module_follow_heads_and_sizes():
    spec = parse_config({**CONFIG, "head_dim": 16})
    assert spec.module_shape("q_proj") == (32, 64)
    assert spec.module_shape("k_proj") == spec.module_shape("v_proj") == (32, 32)
    assert spec.module_shape("o_proj") == (64, 32)
    assert spec.module_shape("down_proj") == (48, 32)
    assert module_path(3, "up_proj") == "model.layers.3.mlp.up_proj"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, (True, False, False)),
        ({"architectures": ["Qwen3ForCausalLM"]}, (False, False, True)),
        ({"attention_bias": True}, (True, True, False)),
    ],
)
def test_families_differ_in_biases_and_norms(changes, expected):
    spec = parse_config({**CONFIG, **changes})
    assert (spec.qkv_bias, spec.o_bias, spec.qk_norm) == expected


def test_what_a_family_leaves_out_of_its_config_is_filled_in():
    bare = {key: value for key, value in CONFIG.items() if key != "tie_word_embeddings"}
    smollm3 = parse_config({**bare, "architectures": ["SmolLM3ForCausalLM"]})
    assert smollm3.tied_embeddings
    assert smollm3.rope_theta == 2000000.0
    assert smollm3.layers_without_rope == ()
    every_second = parse_config(
        {**bare, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2}
    )
    assert every_second.layers_without_rope == (1,)
    assert not parse_config(bare).tied_embeddings


def test_a_fused_checkpoint_stacks_the_rows_of_its_modules():
    spec = parse_config(
        {**CONFIG, "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5}
    )
    assert spec.stored_modules(("q_proj", "k_proj", "v_proj")) == ("qkv_proj",)
    assert spec.stored_modules(("o_proj",)) == ("o_proj",)
    assert spec.module_shape("qkv_proj") == (32, 64)
    assert spec.module_shape("gate_up_proj") == (32, 96)
    assert module_path(0, "qkv_proj") == "model.layers.0.self_attn.qkv_proj"
    assert spec.rotary_dim == 4


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"architectures": "LlamaForCausalLM2"}, "LlamaForCausalLM2"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "mscale": 0.7}}, "mscale"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate"),
        ({"rope_scaling": {**YARN, "beta_fast": -1}}, "beta_fast"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "dynamic"),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]},
                "original_max_position_embeddings": 64,
            },
            "short_factor",
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 0], "long_factor": [1]},
            },
            "short_factor",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longrope"),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.4},
            "partial_rotary_factor",
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0}}, "low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ({"rope_parameters": "linear"}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "8"}, "sliding_window"),
    ],
)
def test_configurations_that_change_the_output_unseen_are_refused(changes, shown):
    with pytest.raises(BaseModelUnsupported) as raised:
        parse_config({**CONFIG, **changes})
    assert shown in raised.value.message


def test_longrope_is_served_within_its_original_context():
    spec = parse_config(
        {
            **CONFIG,
            "architectures": ["Phi3ForCausalLM"],
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 2], "long_factor": [9] * 4},
        }
    )
    assert spec.context_tokens == 64
    assert spec.rope_scaling["factor"] == 8


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "null"])
def test_configuration_that_is_no_object_is_refused(text):
    with pytest.raises(BaseModelUnsupported, match=r"config\.json"):
        parse_config_json(text)


def test_folder_gives_facts_and_a_digest_of_its_weights(tmp_path):
    folder = write_base_folder(tmp_path / "base")
    facts, config_json, digest = read_base_folder(folder, "base", ("org/base",))
    assert parse_config_json(config_json) == facts.spec
    assert (facts.name, facts.aliases, facts.eos_token_ids) == ("base", ("org/base",), (2,))
    assert facts.vocabulary_digest.startswith("sha256:")
    other = write_base_folder(tmp_path / "other", template="{{ other }}")
    other_facts, _, other_digest = read_base_folder(other, "base")
    assert other_digest == digest
    assert other_facts.chat_template_digest != facts.chat_template_digest
    assert other_facts.vocabulary_digest == facts.vocabulary_digest


def test_generation_config_says_where_sequences_end(tmp_path):
    folder = write_base_folder(tmp_path / "base")
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert read_base_folder(folder, "base")[0].eos_token_ids == (2, 5)


def test_weights_digest_changes_with_one_byte_and_with_a_name(tmp_path):
    folder = write_base_folder(tmp_path / "base")
    weights = folder / "model.safetensors"
    before = weights_digest(folder)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = weights_digest(folder)
    weights.rename(folder / "other.safetensors")
    assert len({before, changed, weights_digest(folder)}) == 3


def test_digest_cache_is_used_and_never_believed_after_a_change(tmp_path, monkeypatch):
    folder, cache = write_base_folder(tmp_path / "base"), tmp_path / "cache" / "digests.json"
    first = weights_digest(folder, cache)
    hashed = []
    real = base_folder._sha256
    monkeypatch.setattr(base_folder, "_sha256", lambda path: hashed.append(path) or real(path))
    assert weights_digest(folder, cache) == first
    assert hashed == []
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert weights_digest(folder, cache) == first
    assert hashed == [weights]
    cache.write_text("[broken")
    assert weights_digest(folder, cache) == first


def test_shards_are_those_that_the_index_names(tmp_path):
    folder = write_base_folder(tmp_path / "base")
    weights = folder / "model.safetensors"
    weights.rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    (folder / "extra.safetensors").write_bytes(b"x")
    names = [path.name for path in base_folder.weight_files(folder)]
    assert names == ["model-00001-of-00001.safetensors"]
    for broken in ('{"weight_map": {"a": "gone.safetensors"}}', '{"weight_map": 1}', "[", "{}"):
        index.write_text(broken)
        with pytest.raises(BaseModelUnsupported, match=r"index\.json"):
            base_folder.weight_files(folder)
    index.write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(BaseModelUnsupported, match="same folder"):
        base_folder.weight_files(folder)


@pytest.mark.parametrize(
    ("missing", "shown"),
    [
        ("tokenizer.json", "use_fast=True"),
        ("config.json", "config.json"),
        ("model.safetensors", "safetensors"),
    ],
)
def test_missing_files_are_named_with_the_fix(tmp_path, missing, shown):
    folder = write_base_folder(tmp_path / "base")
    (folder / missing).unlink()
    with pytest.raises(BaseModelUnsupported) as raised:
        read_base_folder(folder, "base")
    assert shown in raised.value.message


def test_pickle_only_weights_name_the_pickle_and_the_conversion(tmp_path):
    folder = write_base_folder(tmp_path / "base")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BaseModelUnsupported) as raised:
        read_base_folder(folder, "base")
    assert "pytorch_model.bin" in raised.value.message
    assert "save_pretrained" in raised.value.message


def test_unreadable_tokenizer_is_refused_by_file(tmp_path):
    folder = write_base_folder(tmp_path / "base")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(BaseModelUnsupported, match=r"tokenizer\.json"):
        read_base_folder(folder, "base")


def hub(tmp_path: Path, monkeypatch, revisions=("abc",), main: str | None = "abc") -> Path:
    cache = tmp_path / "hub"
    repository = cache / "models--org--tiny"
    for revision in revisions:
        (repository / "snapshots" / revision).mkdir(parents=True)
    if main is not None:
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(main)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return repository / "snapshots"


def test_hub_id_is_found_in_the_local_cache_only(tmp_path, monkeypatch):
    snapshots = hub(tmp_path, monkeypatch, ("abc", "def"))
    assert find_base_folder("org/tiny") == snapshots / "abc"
    with pytest.raises(NotFound) as raised:
        find_base_folder("org/absent")
    assert raised.value.reason == "BASE_MODEL_NOT_FOUND"
    assert "hf download org/absent" in raised.value.message


def test_single_snapshot_is_found_without_a_reference(tmp_path, monkeypatch):
    snapshots = hub(tmp_path, monkeypatch, main=None)
    assert find_base_folder("org/tiny") == snapshots / "abc"


@pytest.mark.parametrize("main", ["../../x", "", "0" * 40])
def test_reference_that_leads_elsewhere_is_not_followed(tmp_path, monkeypatch, main):
    hub(tmp_path, monkeypatch, ("abc", "def"), main)
    with pytest.raises(NotFound):
        find_base_folder("org/tiny")


@pytest.mark.parametrize("name", ["../../etc", "a/b/c", "", "org/..", "/nowhere"])
def test_path_that_does_not_exist_is_no_hub_id(tmp_path, monkeypatch, name):
    hub(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound):
        find_base_folder(name)
