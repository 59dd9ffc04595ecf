"""Folders that PEFT itself saves: targets, ranks and scalings as PEFT has them, or a refusal."""

from __future__ import annotations

import dataclasses

import pytest

from loraplex.adapter_format import check_adapter, options, read_folder
from loraplex.base_model import module_path
from loraplex.status import AdapterRefused
from tests.support.tiny_adapters import BASE_NAME, CONFIG, tiny_base

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

BASE = tiny_base()

ACCEPTED = {
    "defaults": {},
    "all linear": {"target_modules": "all-linear"},
    "rank-stabilised": {"use_rslora": True, "r": 3, "lora_alpha": 5},
    "some layers": {"layers_to_transform": [1], "target_modules": ["q_proj", "up_proj"]},
    "regular expression": {"target_modules": r".*layers\.0\..*(q_proj|down_proj)"},
    "patterns": {
        "target_modules": ["q_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {r"layers.0.self_attn.q_proj": 3},
    },
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "ignored by PEFT itself": {"fan_in_fan_out": True},
    "weight-decomposed": {"use_dora": True, "target_modules": ["k_proj", "up_proj"]},
    "biases of a base without any": {"bias": "all"},
    "biases of LoRA": {"lora_bias": True, "bias": "lora_only"},
}
REFUSED = {
    "modules_to_save": {"modules_to_save": ["post_attention_layernorm"]},
    "ensure_weight_tying": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "init_lora_weights": {"init_lora_weights": "pissa"},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "alora_invocation_tokens": {"alora_invocation_tokens": [1, 2]},
}


@pytest.fixture(scope="module")
def model():
    config = {key: value for key, value in CONFIG.items() if key not in ("architectures", "dtype")}
    return lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def saved(model, folder, changes):
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", base_model_name_or_path=BASE_NAME, **{"r": 4, **changes}
    )
    wrapped = peft.get_peft_model(model(), config)
    wrapped.save_pretrained(folder)
    return wrapped


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ACCEPTED)
def test_saved_folder_means_what_peft_has(model, tmp_path, case):
    wrapped = saved(model, tmp_path, ACCEPTED[case])
    checked = check_adapter(read_folder(tmp_path).files, BASE, base_model_confirmed=True)
    ours = {
        module_path(target.layer, target.module): (target.rank, target.scaling)
        for target in checked.spec.targets
    }
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in wrapped.named_modules()
        if len(getattr(module, "lora_A", ()))
    }
    assert ours.keys() == theirs.keys()
    for name, (rank, scaling) in theirs.items():
        assert ours[name] == (rank, pytest.approx(scaling))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_saved_folder_with_more_than_plain_lora_is_refused_by_name(model, tmp_path, case):
    saved(model, tmp_path, REFUSED[case])
    with pytest.raises(AdapterRefused) as raised:
        check_adapter(read_folder(tmp_path).files, BASE, base_model_confirmed=True)
    assert raised.value.reason in ("OPTION_UNSUPPORTED", "TARGET_UNSUPPORTED")
    assert case in raised.value.message


def test_every_field_of_the_installed_peft_is_classified():
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    known = options._SUPPORTED | options._NEUTRAL | options.REFUSED.keys()
    assert fields - known == set()
    assert not options._SUPPORTED & options._NEUTRAL
    assert not options.REFUSED.keys() & (options._SUPPORTED | options._NEUTRAL)
