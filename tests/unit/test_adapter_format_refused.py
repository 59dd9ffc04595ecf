"""One case a refusal: reason, and a message that names what is wrong."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from loraplex.adapter_format import check_adapter, parse_manifest, read_folder
from loraplex.base_model import LAYER_MODULES, module_path
from loraplex.status import AdapterRefused
from tests.support.tiny_adapters import (
    adapter_tensors,
    base_of,
    safetensors_bytes,
    tiny_base,
    tokenizer_json,
    write_adapter,
    write_base_folder,
)

BASE = tiny_base()
ATTENTION0 = "base_model.model.model.layers.0.self_attn"
MLP0 = "base_model.model.model.layers.0.mlp"
Q0, K0, QKV0 = (f"{ATTENTION0}.{name}" for name in ("q_proj", "k_proj", "qkv_proj"))


def refusal(folder, base=BASE, **options) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as raised:
        check_adapter(read_folder(folder).files, base, **options)
    return raised.value


def renamed(old, new, tensors=None):
    source = adapter_tensors(BASE.spec) if tensors is None else tensors
    return {key.replace(old, new): value for key, value in source.items()}


CONFIG_CASES = {
    "no peft type": ({"peft_type": None}, "CONFIG_INVALID", "peft_type"),
    "peft type of nobody": ({"peft_type": "NEXT"}, "OPTION_UNSUPPORTED", "NEXT"),
    "peft type number": ({"peft_type": 7}, "OPTION_UNSUPPORTED", "peft_type is 7"),
    "task": ({"task_type": "SEQ_CLS"}, "OPTION_UNSUPPORTED", "task_type"),
    "other bias": ({"bias": "boft_only"}, "OPTION_UNSUPPORTED", "boft_only"),
    "bias flag": ({"bias": True}, "OPTION_UNSUPPORTED", "bias"),
    "dora without tensors": (
        {"use_dora": True}, "WEIGHTS_INVALID", "q_proj.lora_magnitude_vector",
    ),
    "lora bias without tensors": ({"lora_bias": True}, "WEIGHTS_INVALID", "q_proj.lora_B.bias"),
    "dora and lora bias": (
        {"use_dora": True, "lora_bias": True}, "OPTION_UNSUPPORTED", "lora_bias",
    ),
    "dora text": ({"use_dora": "yes"}, "CONFIG_INVALID", "use_dora"),
    "saved modules": ({"modules_to_save": ["norm"]}, "OPTION_UNSUPPORTED", "modules_to_save: norm"),
    "saved modules without tensors": (
        {"modules_to_save": ["lm_head"]}, "WEIGHTS_INVALID", "lm_head.weight",
    ),
    "saved modules that are no list": (
        {"modules_to_save": "lm_head"}, "CONFIG_INVALID", "modules_to_save",
    ),
    "tokens": ({"trainable_token_indices": [1]}, "OPTION_UNSUPPORTED", "trainable_token_indices"),
    "replication": ({"layer_replication": [[0, 2]]}, "OPTION_UNSUPPORTED", "layer_replication"),
    "parameters": ({"target_parameters": ["w"]}, "OPTION_UNSUPPORTED", "target_parameters"),
    "alora": ({"alora_invocation_tokens": [1]}, "OPTION_UNSUPPORTED", "alora_invocation_tokens"),
    "qalora": ({"use_qalora": True}, "OPTION_UNSUPPORTED", "use_qalora"),
    "bdlora": ({"use_bdlora": {"nblocks": 2}}, "OPTION_UNSUPPORTED", "use_bdlora"),
    "arrow": ({"arrow_config": {"k": 1}}, "OPTION_UNSUPPORTED", "arrow_config"),
    "kasa": ({"kasa_config": {"beta": 1}}, "OPTION_UNSUPPORTED", "kasa_config"),
    "monteclora": ({"monteclora_config": {"n": 1}}, "OPTION_UNSUPPORTED", "monteclora_config"),
    "velora": ({"velora_config": {"n": 1}}, "OPTION_UNSUPPORTED", "velora_config"),
    "megatron": ({"megatron_config": {"n": 1}}, "OPTION_UNSUPPORTED", "megatron_config"),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, "OPTION_UNSUPPORTED", "pissa_niter_4"),
    "pissa without svd": ({"init_lora_weights": "pissa"}, "OPTION_UNSUPPORTED", "pissa"),
    "olora": ({"init_lora_weights": "olora"}, "OPTION_UNSUPPORTED", "olora"),
    "corda": ({"init_lora_weights": "corda"}, "OPTION_UNSUPPORTED", "corda"),
    "lora-ga": ({"init_lora_weights": "lora_ga"}, "OPTION_UNSUPPORTED", "lora_ga"),
    "loftq": ({"init_lora_weights": "loftq"}, "OPTION_UNSUPPORTED", "loftq"),
    "init of nobody": ({"init_lora_weights": "next"}, "OPTION_UNSUPPORTED", "next"),
    "init list": ({"init_lora_weights": ["pissa"]}, "OPTION_UNSUPPORTED", "pissa"),
    "unknown option": ({"use_next_idea": True}, "OPTION_UNSUPPORTED", "use_next_idea"),
    "rank zero": ({"r": 0}, "RANK_UNSUPPORTED", "r is 0"),
    "rank text": ({"r": "8"}, "RANK_UNSUPPORTED", "r is 8"),
    "rank truth": ({"r": True}, "RANK_UNSUPPORTED", "r is True"),
    "rank pattern": ({"rank_pattern": {"q_proj": -1}}, "RANK_UNSUPPORTED", "q_proj"),
    "alpha text": ({"lora_alpha": "8"}, "CONFIG_INVALID", "lora_alpha"),
    "alpha huge": ({"lora_alpha": 10**400}, "CONFIG_INVALID", "lora_alpha"),
    "alpha above fp32": ({"lora_alpha": 1e39}, "CONFIG_INVALID", "lora_alpha is 1e+39"),
    "alpha pattern above fp32": (
        {"alpha_pattern": {"q_proj": -1e39}},
        "CONFIG_INVALID",
        "alpha_pattern",
    ),
    "rslora text": ({"use_rslora": "yes"}, "CONFIG_INVALID", "use_rslora"),
    "targets number": ({"target_modules": [1]}, "CONFIG_INVALID", "target_modules"),
    "targets regex": ({"target_modules": "("}, "CONFIG_INVALID", "target_modules"),
    "runaway regex": ({"target_modules": "(a+)+b"}, "CONFIG_INVALID", "'(a+)+b' could match"),
    "layers text": ({"layers_to_transform": ["0"]}, "CONFIG_INVALID", "layers_to_transform"),
    "layers and regex": (
        {"layers_to_transform": [0], "target_modules": ".*q_proj"},
        "CONFIG_INVALID",
        "layers_to_transform",
    ),
    "layers pattern and regex": (
        {"layers_pattern": "layers", "target_modules": ".*q_proj"},
        "CONFIG_INVALID",
        "layers_pattern",
    ),
    "layers pattern alone": ({"layers_pattern": "layers"}, "CONFIG_INVALID", "layers_pattern"),
    "lora bias and init": (
        {"lora_bias": True, "init_lora_weights": "gaussian"}, "OPTION_UNSUPPORTED", "lora_bias",
    ),
    "patterns": ({"alpha_pattern": ["q_proj"]}, "CONFIG_INVALID", "alpha_pattern"),
    "many patterns": (
        {"rank_pattern": {f"m{index}": 1 for index in range(2049)}}, "CONFIG_INVALID", "2049",
    ),
    "base number": ({"base_model_name_or_path": 5}, "CONFIG_INVALID", "base_model_name_or_path"),
    "other base": ({"base_model_name_or_path": "org/x"}, "BASE_MODEL_MISMATCH", "org/x"),
    "no base": ({"base_model_name_or_path": None}, "BASE_MODEL_MISMATCH", "does not say"),
    "unknown target": ({"target_modules": ["q_proj", "c_attn"]}, "TARGET_UNSUPPORTED", "c_attn"),
    "fused target": ({"target_modules": ["qkv_proj"]}, "TARGET_UNSUPPORTED", "qkv_proj"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "WEIGHTS_INVALID", "lora_A of lm_head"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "WEIGHTS_INVALID", "embed_tokens"),
    "final norm": ({"target_modules": ["q_proj", "norm"]}, "TARGET_UNSUPPORTED", "model.norm"),
    "regex without a match": (
        {"target_modules": r".*\.attn\..*"}, "TARGET_UNSUPPORTED", "not in target_modules",
    ),
    "everything excluded": (
        {"exclude_modules": ["q_proj", "v_proj"]}, "TARGET_UNSUPPORTED", "not in target_modules",
    ),
    "no target": ({"target_modules": []}, "TARGET_UNSUPPORTED", "not in target_modules"),
    "target without tensors": (
        {"target_modules": ["q_proj", "v_proj", "k_proj"]},
        "WEIGHTS_INVALID",
        "k_proj.lora_A",
    ),
    "tensors without target": ({"target_modules": ["q_proj"]}, "TARGET_UNSUPPORTED", "v_proj"),
    "rank against tensors": ({"r": 8}, "RANK_UNSUPPORTED", "rank 8"),
    "pattern against tensors": ({"rank_pattern": {"v_proj": 2}}, "RANK_UNSUPPORTED", "rank 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_configuration_is_refused_by_name(tmp_path, case):
    changes, reason, shown = CONFIG_CASES[case]
    error = refusal(write_adapter(tmp_path / "a", config=changes))
    assert error.reason == reason, error.message
    assert shown in error.message


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{", b'{"r": NaN}', b"\xff\xfe", b'{"r": 4, "r": 8}', b"[" * 200_000,
        b'{"a":' * 100_000, b'{"r": ' + b"9" * 5000 + b"}", b" " * ((1 << 20) + 1),
    ],
)  # fmt: skip
def test_configuration_that_is_no_small_json_object_is_refused(tmp_path, text):
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_config.json").write_bytes(text)
    with pytest.raises(AdapterRefused) as raised:
        check_adapter(read_folder(folder).files, BASE)
    assert raised.value.reason in ("CONFIG_INVALID", "RANK_UNSUPPORTED")


def test_neutral_options_pass_whatever_they_hold(tmp_path):
    config = {
        "lora_dropout": 0.1, "inference_mode": True, "peft_version": "9.9", "revision": "main",
        "auto_mapping": {"a": 1}, "megatron_core": "megatron.core", "qalora_group_size": 16,
        "loftq_config": {"bits": 4}, "runtime_config": {"x": 1}, "future_option": None,
        "init_lora_weights": "gaussian", "ensure_weight_tying": True, "bias": "none",
    }  # fmt: skip
    folder = write_adapter(tmp_path / "a", config=config)
    assert check_adapter(read_folder(folder).files, BASE).spec.max_rank == 4


TENSOR_CASES = {
    "magnitude without dora": (
        lambda: {f"{Q0}.lora_magnitude_vector": np.ones(32)}, "OPTION_UNSUPPORTED", "use_dora",
    ),
    "bias of lora unasked": (
        lambda: {f"{Q0}.lora_B.bias": np.ones(32)}, "OPTION_UNSUPPORTED", "lora_bias",
    ),
    "base layer": (
        lambda: {f"{Q0}.base_layer.weight": np.ones((32, 32))}, "OPTION_UNSUPPORTED", "base layer",
    ),
    "saved module": (
        lambda: {"base_model.model.lm_head.modules_to_save.weight": np.ones((64, 32))},
        "TARGET_UNSUPPORTED",
        "modules_to_save",
    ),
    "embedding": (
        lambda: {"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 4))},
        "TARGET_UNSUPPORTED",
        "embed_tokens.lora_embedding_A",
    ),
    "unknown kind": (
        lambda: {f"{Q0}.lora_C.weight": np.ones(32)}, "OPTION_UNSUPPORTED", "lora_C.weight",
    ),
    "bias unasked": (
        lambda: {f"{Q0}.base_layer.bias": np.ones(32)}, "OPTION_UNSUPPORTED", "bias none",
    ),
    "bias of another module unasked": (
        lambda: {f"{K0}.bias": np.ones(16)}, "OPTION_UNSUPPORTED", "bias none",
    ),
    "fused and split": (
        lambda: {f"{QKV0}.lora_A.weight": np.ones((4, 32))}, "WEIGHTS_INVALID", "qkv_proj, q_proj",
    ),
    "vision tower": (
        lambda: {"base_model.model.vision_tower.layers.0.mlp.up_proj.lora_A.weight": np.ones(4)},
        "TARGET_UNSUPPORTED",
        "vision_tower",
    ),
    "audio tower": (
        lambda: {"base_model.model.audio_tower.layers.0.fc1.lora_A.weight": np.ones(4)},
        "TARGET_UNSUPPORTED",
        "audio_tower",
    ),
    "projector": (
        lambda: {"base_model.model.multi_modal_projector.linear_1.lora_B.weight": np.ones(4)},
        "TARGET_UNSUPPORTED",
        "multi_modal_projector",
    ),
    "expert": (
        lambda: {f"{MLP0}.experts.3.up_proj.lora_A.weight": np.ones(4)},
        "TARGET_UNSUPPORTED",
        "experts.3",
    ),
    "expert parameter": (
        lambda: {f"{MLP0}.experts.base_layer.lora_A.weight": np.ones(4)},
        "OPTION_UNSUPPORTED",
        "experts",
    ),
    "router": (
        lambda: {f"{MLP0}.gate.lora_A.weight": np.ones((4, 32))},
        "TARGET_UNSUPPORTED",
        "mlp.gate",
    ),
    "norm": (
        lambda: {"base_model.model.model.layers.0.input_layernorm.lora_A.weight": np.ones(32)},
        "TARGET_UNSUPPORTED",
        "input_layernorm",
    ),
    "new tokens": (
        lambda: {
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": np.ones(32)
        },
        "OPTION_UNSUPPORTED",
        "trainable_token_indices",
    ),
    "loha": (lambda: {f"{Q0}.hada_w1_a": np.ones((32, 4))}, "OPTION_UNSUPPORTED", "hada_w1_a"),
    "lokr": (lambda: {f"{Q0}.lokr_w1": np.ones((4, 4))}, "OPTION_UNSUPPORTED", "lokr_w1"),
    "ia3": (lambda: {f"{Q0}.ia3_l": np.ones((32, 1))}, "OPTION_UNSUPPORTED", "ia3_l"),
    "adalora": (lambda: {f"{Q0}.lora_E": np.ones((4, 1))}, "OPTION_UNSUPPORTED", "lora_E"),
    "vera": (lambda: {f"{Q0}.vera_lambda_d": np.ones(4)}, "OPTION_UNSUPPORTED", "vera_lambda_d"),
    "prompt": (lambda: {"prompt_embeddings": np.ones((4, 32))}, "OPTION_UNSUPPORTED", "prompt"),
    "unknown module": (
        lambda: {"base_model.model.model.layers.0.self_attn.qkv.lora_A.weight": np.ones((4, 4))},
        "TARGET_UNSUPPORTED",
        "self_attn.qkv",
    ),
    "module in the wrong part": (
        lambda: {"base_model.model.model.layers.0.mlp.q_proj.lora_A.weight": np.ones((4, 32))},
        "TARGET_UNSUPPORTED",
        "mlp.q_proj",
    ),
    "head": (
        lambda: {"base_model.model.lm_head.lora_A.weight": np.ones((4, 32))},
        "TARGET_UNSUPPORTED",
        "lm_head",
    ),
    "same matrix twice": (
        lambda: {f"{Q0}.lora_A.default.weight": np.ones((4, 32))},
        "WEIGHTS_INVALID",
        "same matrix",
    ),
    "mixed prefixes": (
        lambda: {"base_model.model.layers.0.mlp.up_proj.lora_A.weight": np.ones((4, 32))},
        "WEIGHTS_INVALID",
        "different ways",
    ),
    "layer out of range": (
        lambda: renamed("layers.1", "layers.7"), "BASE_MODEL_MISMATCH", "is 7",
    ),
    "columns": (
        lambda: {f"{Q0}.lora_A.weight": np.ones((4, 31))}, "BASE_MODEL_MISMATCH", "is 31",
    ),
    "rows": (lambda: {f"{Q0}.lora_B.weight": np.ones((33, 4))}, "BASE_MODEL_MISMATCH", "is 33"),
    "vector": (lambda: {f"{Q0}.lora_B.weight": np.ones(32)}, "WEIGHTS_INVALID", "2-D"),
    "other rank in B": (
        lambda: {f"{Q0}.lora_B.weight": np.ones((32, 5))}, "RANK_UNSUPPORTED", "rank 4",
    ),
    "not a number": (
        lambda: {f"{Q0}.lora_A.weight": np.full((4, 32), np.nan)},
        "WEIGHTS_NOT_FINITE",
        f"{Q0}.lora_A.weight",
    ),
    "infinity": (
        lambda: {f"{Q0}.lora_B.weight": np.full((32, 4), -np.inf)},
        "WEIGHTS_NOT_FINITE",
        f"{Q0}.lora_B.weight",
    ),
}  # fmt: skip


def other_methods() -> list[str]:
    peft = pytest.importorskip("peft")
    return sorted(kind.value for kind in peft.PeftType if kind.value != "LORA")


def test_every_other_method_of_the_installed_peft_is_refused_by_name(tmp_path):
    methods = other_methods()
    assert {"LOHA", "LOKR", "ADALORA", "VERA", "IA3", "PREFIX_TUNING", "OFT"} <= set(methods)
    for method in methods:
        error = refusal(write_adapter(tmp_path / method, config={"peft_type": method}))
        assert error.reason == "OPTION_UNSUPPORTED"
        assert f"peft_type is '{method}'" in error.message


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensors_are_refused_by_name(tmp_path, case):
    changes, reason, shown = TENSOR_CASES[case]
    tensors = {**adapter_tensors(BASE.spec), **changes()}
    error = refusal(write_adapter(tmp_path / "a", tensors=tensors))
    assert error.reason == reason, error.message
    assert shown in error.message


BIASED = tiny_base(attention_bias=True)
VECTOR_CASES = {
    "missing bias": ({"bias": "lora_only"}, {}, "WEIGHTS_INVALID", "q_proj.base_layer.bias"),
    "missing bias of a module without LoRA": (
        {"bias": "all"}, {"q_proj", "v_proj"}, "WEIGHTS_INVALID", "k_proj.bias",
    ),
    "bias that PEFT ignores": (
        {"bias": "all"}, {"q_proj.bias"}, "WEIGHTS_INVALID", "base_layer.bias",
    ),
    "base layer's bias without LoRA": (
        {"bias": "all"}, {"k_proj"}, "TARGET_UNSUPPORTED", "k_proj.base_layer.bias",
    ),
    "bias outside lora_only": (
        {"bias": "lora_only"}, {"q_proj", "v_proj", "k_proj.bias"},
        "OPTION_UNSUPPORTED", "lora_only",
    ),
    "bias that the base lacks": (
        {"bias": "all"}, {"down_proj.bias"}, "TARGET_UNSUPPORTED", "has no bias there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VECTOR_CASES)
def test_biases_are_refused_by_name(tmp_path, case):
    config, modules, reason, shown = VECTOR_CASES[case]
    tensors = adapter_tensors(BIASED.spec)
    for layer in range(BIASED.spec.num_layers):
        for module in modules:
            name, _, plain = module.partition(".")
            path = f"base_model.model.{module_path(layer, name)}.{plain or 'base_layer.bias'}"
            tensors[path] = np.ones(BIASED.spec.module_shape(name)[1], "float32")
    error = refusal(write_adapter(tmp_path / "a", tensors=tensors, config=config), BIASED)
    assert error.reason == reason, error.message
    assert shown in error.message


@pytest.mark.parametrize("name", ["lora_magnitude_vector", "base_layer.bias", "lora_B.bias"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_refused_by_name(tmp_path, name, value):
    tensors = adapter_tensors(BIASED.spec, ["q_proj"])
    for layer in range(BIASED.spec.num_layers):
        tensors[f"base_model.model.{module_path(layer, 'q_proj')}.{name}"] = np.ones(32, "float32")
    tensors[f"{Q0}.{name}"][7] = value
    option = {"lora_magnitude_vector": {"use_dora": True}, "lora_B.bias": {"lora_bias": True}}
    config = {"target_modules": ["q_proj"], **option.get(name, {"bias": "lora_only"})}
    error = refusal(write_adapter(tmp_path / "a", tensors=tensors, config=config), BIASED)
    assert error.reason == "WEIGHTS_NOT_FINITE"
    assert f"{Q0}.{name}" in error.message


def test_one_magnitude_under_two_names_is_refused(tmp_path):
    tensors = adapter_tensors(BASE.spec, ["q_proj"])
    for ending in ("lora_magnitude_vector", "lora_magnitude_vector.weight"):
        tensors[f"{Q0}.{ending}"] = np.ones(32, "float32")
    config = {"target_modules": ["q_proj"], "use_dora": True}
    error = refusal(write_adapter(tmp_path / "a", tensors=tensors, config=config))
    assert error.reason == "WEIGHTS_INVALID"
    assert "same matrix" in error.message


@pytest.mark.parametrize("shape", [(31,), (1, 32), (33,)])
@pytest.mark.parametrize("name", ["lora_magnitude_vector", "base_layer.bias"])
def test_vectors_of_another_shape_are_refused(tmp_path, name, shape):
    tensors = adapter_tensors(BIASED.spec, ["q_proj"])
    for layer in range(BIASED.spec.num_layers):
        path = f"base_model.model.{module_path(layer, 'q_proj')}"
        tensors[f"{path}.{name}"] = np.ones(shape if layer else 32, "float32")
    options = {"use_dora": True} if "magnitude" in name else {"bias": "lora_only"}
    config = {"target_modules": ["q_proj"], **options}
    error = refusal(write_adapter(tmp_path / "a", tensors=tensors, config=config), BIASED)
    assert error.reason == ("BASE_MODEL_MISMATCH" if len(shape) == 1 else "WEIGHTS_INVALID")
    assert f"layers.1.self_attn.q_proj.{name}" in error.message


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, -1])
def test_one_value_that_is_not_finite_is_found_in_every_dtype(tmp_path, dtype, value, position):
    tensors = adapter_tensors(BASE.spec)
    name = list(tensors)[-1]
    tensors[name].reshape(-1)[position] = value
    error = refusal(write_adapter(tmp_path / "a", tensors=tensors, dtype=dtype))
    assert error.reason == "WEIGHTS_NOT_FINITE"
    assert name in error.message


def test_largest_finite_values_are_no_infinities(tmp_path):
    tensors = adapter_tensors(BASE.spec)
    next(iter(tensors.values()))[0, 0] = 65504
    folder = write_adapter(tmp_path / "a", tensors=tensors, dtype="F16")
    assert check_adapter(read_folder(folder).files, BASE).spec.max_rank == 4


def test_rank_above_the_limit_names_both(tmp_path):
    error = refusal(write_adapter(tmp_path / "a", rank=8), max_rank=4)
    assert error.reason == "RANK_UNSUPPORTED"
    assert error.metadata["value"] == "8"
    assert error.metadata["limit"] == "4"


def test_wrong_base_by_shape_is_refused_even_when_confirmed(tmp_path):
    other = tiny_base(hidden_size=64)
    error = refusal(write_adapter(tmp_path / "a", other.spec), base_model_confirmed=True)
    assert error.reason == "BASE_MODEL_MISMATCH"
    assert "64" in error.message
    assert "32" in error.message


def test_declared_base_mismatch_names_both_and_the_ways_out(tmp_path):
    folder = write_adapter(tmp_path / "a", config={"base_model_name_or_path": "org/other"})
    message = refusal(folder).message
    for part in ("org/other", BASE.name, "base-model alias", "--base-model-confirmed"):
        assert part in message


def test_float64_weights_are_refused(tmp_path):
    folder = write_adapter(tmp_path / "a")
    content = safetensors_bytes(adapter_tensors(BASE.spec))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for entry in header.values():
        if "shape" in entry:
            entry["dtype"] = "F64"
            entry["data_offsets"] = [2 * offset for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    body = content[8 + length :] * 2
    (folder / "adapter_model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + body
    )
    error = refusal(folder)
    assert error.reason == "WEIGHTS_INVALID"
    assert "F64" in error.message


def test_tokenizer_with_another_vocabulary_is_refused(tmp_path):
    base = base_of(write_base_folder(tmp_path / "base"))
    folder = write_adapter(tmp_path / "a")
    tokenizer = tokenizer_json()
    tokenizer["added_tokens"].append({"id": 64, "content": "<new>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert refusal(folder, base).reason == "VOCABULARY_MISMATCH"


@pytest.mark.parametrize("text", ["", "{}", '{"model": {"vocab": {"a": "b"}}}', "[" * 100_000])
def test_unreadable_tokenizer_is_refused(tmp_path, text):
    folder = write_adapter(tmp_path / "a")
    (folder / "tokenizer.json").write_text(text)
    assert refusal(folder).reason == "VOCABULARY_MISMATCH"


def test_end_of_sequence_id_outside_the_vocabulary_is_refused(tmp_path):
    folder = write_adapter(tmp_path / "a")
    (folder / "generation_config.json").write_text('{"eos_token_id": 64}')
    error = refusal(folder)
    assert error.reason == "VOCABULARY_MISMATCH"
    assert "64" in error.message


@pytest.mark.parametrize("value", ['"2"', "-1", "[2, null]", "true"])
def test_end_of_sequence_ids_of_odd_kinds_are_refused(tmp_path, value):
    folder = write_adapter(tmp_path / "a")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    assert refusal(folder).reason == "VOCABULARY_MISMATCH"


def test_old_tokenizer_alone_cannot_be_compared(tmp_path):
    folder = write_adapter(tmp_path / "a")
    (folder / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(AdapterRefused) as raised:
        read_folder(folder)
    assert raised.value.reason == "VOCABULARY_MISMATCH"


def folder_refusal(path) -> AdapterRefused:
    with pytest.raises(AdapterRefused) as raised:
        read_folder(path)
    return raised.value


def test_folder_that_is_none_is_refused(tmp_path):
    assert "does not exist" in folder_refusal(tmp_path / "nowhere").message
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"")
    assert "is a file" in folder_refusal(file).message


def test_folder_without_configuration_names_the_file(tmp_path):
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    error = folder_refusal(folder)
    assert error.reason == "CONFIG_INVALID"
    assert "adapter_config.json" in error.message


def test_folder_above_the_adapter_is_told_where_it_lies(tmp_path):
    write_adapter(tmp_path / "run" / "checkpoint-100")
    (tmp_path / "run" / "logs").mkdir()
    assert "run/checkpoint-100?" in folder_refusal(tmp_path / "run").message


@pytest.mark.parametrize("name", ["adapter_model.bin", "pytorch_model.bin", "adapter.pt"])
def test_pickle_only_weights_are_refused_with_the_way_out(tmp_path, name):
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / name)
    error = folder_refusal(folder)
    assert error.reason == "WEIGHTS_INVALID"
    assert "safe_serialization" in error.message
    assert name in error.message


def test_weights_under_another_name_are_named(tmp_path):
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "model.safetensors")
    assert "model.safetensors" in folder_refusal(folder).message


@pytest.mark.parametrize("kind", ["outside", "nowhere", "loop", "sibling repository"])
def test_links_out_of_the_folder_are_refused(tmp_path, kind):
    snapshot = tmp_path / "models--org--a" / "snapshots" / "abc"
    folder = write_adapter(snapshot)
    weights = folder / "adapter_model.safetensors"
    targets = {
        "outside": tmp_path / "secret",
        "nowhere": tmp_path / "nothing",
        "loop": weights,
        "sibling repository": tmp_path / "models--org--b" / "blobs" / "x",
    }
    target = targets[kind]
    content = weights.read_bytes()
    weights.unlink()
    if kind in ("outside", "sibling repository"):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    weights.symlink_to(target)
    error = folder_refusal(folder)
    assert error.reason == "CONFIG_INVALID"
    assert "link" in error.message


def test_pipes_and_folders_in_place_of_files_are_refused(tmp_path):
    folder = write_adapter(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    weights.unlink()
    os.mkfifo(weights)
    assert "regular" in folder_refusal(folder).message
    weights.unlink()
    weights.mkdir()
    assert "regular" in folder_refusal(folder).message


def test_oversized_configuration_is_refused_before_it_is_read(tmp_path):
    folder = write_adapter(tmp_path / "a")
    with (folder / "adapter_config.json").open("r+b") as stream:
        stream.truncate(1 << 40)
    assert "at most" in folder_refusal(folder).message


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "a\nb", "", "ä.json"])
def test_file_names_with_path_characters_are_refused(tmp_path, name):
    files = read_folder(write_adapter(tmp_path / "a")).files
    with pytest.raises(AdapterRefused) as raised:
        check_adapter({**files, name: files["adapter_config.json"]}, BASE)
    assert raised.value.reason == "CONFIG_INVALID"


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_missing_files_of_an_upload_are_named(tmp_path, missing):
    files = read_folder(write_adapter(tmp_path / "a")).files
    del files[missing]
    with pytest.raises(AdapterRefused, match=missing):
        check_adapter(files, BASE)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.pop("config"),
        lambda table: table.update(schema=2),
        lambda table: table["config"].pop("r"),
        lambda table: table["config"].update(rank_pattern=[["a"]]),
        lambda table: table.update(files=[{"name": "../x", "size": 1, "sha256": "0" * 64}]),
        lambda table: table.update(files=[{"name": "x", "size": 1, "sha256": "zz"}]),
        lambda table: table.update(files=[{"name": "x", "size": -1, "sha256": "0" * 64}]),
    ],
)
def test_manifests_of_another_kind_are_refused(tmp_path, change):
    files = read_folder(write_adapter(tmp_path / "a", modules=LAYER_MODULES)).files
    table = json.loads(check_adapter(files, BASE).manifest.canonical_json)
    change(table)
    with pytest.raises(AdapterRefused, match="manifest"):
        parse_manifest(json.dumps(table).encode())
