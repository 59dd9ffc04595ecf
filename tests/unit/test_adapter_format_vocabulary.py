"""Embeddings and output head in adapter folders: what is read, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from loraplex.adapter_format import check_adapter, read_folder
from loraplex.base_model import NO_LAYER
from loraplex.status import AdapterRefused
from tests.support.tiny_adapters import adapter_tensors, tiny_base, write_adapter

TIED, UNTIED = tiny_base(), tiny_base(tie_word_embeddings=False)
START = "base_model.model."
EMBED, HEAD = f"{START}model.embed_tokens", f"{START}lm_head"
V, C = 64, 32


def ones(*shape):
    return np.ones(shape, "float32")


def checked(folder, more, base=UNTIED, limits=None, **config):
    tensors = {**adapter_tensors(base.spec), **more}
    modules = ["q_proj", "v_proj", *config.pop("target_modules", [])]
    write_adapter(folder, tensors=tensors, config={"target_modules": modules, **config})
    return check_adapter(read_folder(folder).files, base, **(limits or {}))


def refusal(folder, more, base=UNTIED, **config):
    with pytest.raises(AdapterRefused) as raised:
        checked(folder, more, base, **config)
    return raised.value


@pytest.mark.parametrize(
    ("more", "module", "rank"),
    [
        ({f"{HEAD}.lora_A.weight": ones(4, C), f"{HEAD}.lora_B.weight": ones(V, 4)}, "lm_head", 4),
        (
            {
                f"{EMBED}.lora_embedding_A": ones(4, V),
                f"{EMBED}.lora_embedding_B.default": ones(C, 4),
            },
            "embed_tokens",
            4,
        ),
    ],
)
def test_lora_outside_the_layers_is_a_target_of_no_layer(tmp_path, more, module, rank):
    result = checked(tmp_path, more, target_modules=[module])
    last = result.spec.targets[-1]
    assert (last.layer, last.module, last.rank) == (NO_LAYER, module, rank)
    assert result.report.rows[-1].layers == "-"


def test_an_adapter_of_the_head_alone_is_whole(tmp_path):
    more = {f"{HEAD}.lora_A.weight": ones(4, C), f"{HEAD}.lora_B.weight": ones(V, 4)}
    write_adapter(tmp_path, tensors=more, config={"target_modules": ["lm_head"]})
    spec = check_adapter(read_folder(tmp_path).files, TIED).spec
    assert [target.module for target in spec.targets] == ["lm_head"]


@pytest.mark.parametrize("key", ["weight", "modules_to_save.weight", "modules_to_save.a.weight"])
def test_saved_modules_are_part_of_the_version(tmp_path, key):
    result = checked(tmp_path / "a", {f"{HEAD}.{key}": ones(V, C)}, modules_to_save=["lm_head"])
    assert [(one.module, one.is_copy) for one in result.spec.parts.saved] == [("lm_head", False)]
    assert result.manifest.config["modules_to_save"] == ["lm_head"]
    assert result.manifest.options.modules_to_save == ("lm_head",)
    plain = checked(tmp_path / "b", {})
    assert plain.manifest.config["modules_to_save"] is None
    assert plain.manifest.digest != result.manifest.digest


def test_a_copy_of_the_base_is_served_and_noted_on_every_side_that_shares_it(tmp_path):
    more = {
        f"{HEAD}.base_layer.weight": ones(V, C),
        f"{HEAD}.lora_A.weight": ones(4, C),
        f"{HEAD}.lora_B.weight": ones(V, 4),
    }
    untied = checked(tmp_path / "a", more, target_modules=["lm_head"])
    assert [one.module for one in untied.spec.parts.saved] == ["lm_head"]
    assert "save_embedding_layers=False" in untied.report.notes[0]
    tied = checked(tmp_path / "b", more, TIED, target_modules=["lm_head"])
    assert [one.module for one in tied.spec.parts.saved] == ["embed_tokens", "lm_head"]
    # one tensor, counted once
    assert tied.spec.weights_bytes == untied.spec.weights_bytes


def test_a_side_with_weights_of_its_own_is_not_overwritten_by_a_copy(tmp_path):
    more = {
        f"{HEAD}.weight": ones(V, C),
        f"{EMBED}.base_layer.weight": ones(V, C),
        f"{EMBED}.lora_embedding_A": ones(4, V),
        f"{EMBED}.lora_embedding_B": ones(C, 4),
    }
    result = checked(
        tmp_path, more, TIED, target_modules=["embed_tokens"], modules_to_save=["lm_head"]
    )
    assert [(one.module, one.is_copy) for one in result.spec.parts.saved] == [
        ("embed_tokens", True),
        ("lm_head", False),
    ]


def test_whole_modules_above_the_limit_are_refused_with_the_flag(tmp_path):
    more = {f"{HEAD}.weight": ones(V, C)}
    limits = {"max_saved_bytes": V * C * 4 - 1}
    error = refusal(tmp_path, more, modules_to_save=["lm_head"], limits=limits)
    assert error.reason == "ADAPTER_TOO_LARGE"
    assert "--max-saved-bytes" in error.message
    assert str(V * C * 4) in error.message


CASES = {
    "added tokens": (
        {f"{EMBED}.weight": ones(V + 2, C)}, {"modules_to_save": ["embed_tokens"]},
        "VOCABULARY_MISMATCH", "added while training",
    ),
    "a resized base that was saved along": (
        {f"{EMBED}.weight": ones(V + 2, C)}, {}, "VOCABULARY_MISMATCH", "embed_tokens",
    ),
    "another vocabulary": (
        {f"{EMBED}.lora_embedding_A": ones(4, 40), f"{EMBED}.lora_embedding_B": ones(C, 4)},
        {"target_modules": ["embed_tokens"]}, "VOCABULARY_MISMATCH", "lora_embedding_A",
    ),
    "another width": (
        {f"{HEAD}.lora_A.weight": ones(4, 48), f"{HEAD}.lora_B.weight": ones(V, 4)},
        {"target_modules": ["lm_head"]}, "BASE_MODEL_MISMATCH", "lm_head.lora_A",
    ),
    "another rank": (
        {f"{HEAD}.lora_A.weight": ones(5, C), f"{HEAD}.lora_B.weight": ones(V, 5)},
        {"target_modules": ["lm_head"]}, "RANK_UNSUPPORTED", "rank 4",
    ),
    "not targeted": (
        {f"{HEAD}.lora_A.weight": ones(4, C), f"{HEAD}.lora_B.weight": ones(V, 4)}, {},
        "TARGET_UNSUPPORTED", "lm_head.lora_A",
    ),
    "half a pair": (
        {f"{HEAD}.lora_A.weight": ones(4, C)}, {"target_modules": ["lm_head"]},
        "WEIGHTS_INVALID", "lora_B of lm_head",
    ),
    "saved and targeted": (
        {f"{HEAD}.lora_A.weight": ones(4, C), f"{HEAD}.lora_B.weight": ones(V, 4)},
        {"target_modules": ["lm_head"], "modules_to_save": ["lm_head"]},
        "OPTION_UNSUPPORTED", "lm_head",
    ),
    "two spellings": (
        {f"{HEAD}.lora_A.weight": ones(4, C), f"{HEAD}.lora_A.default.weight": ones(4, C)},
        {"target_modules": ["lm_head"]}, "WEIGHTS_INVALID", "same module",
    ),
    "not finite": (
        {f"{HEAD}.weight": ones(V, C) * np.nan}, {"modules_to_save": ["lm_head"]},
        "WEIGHTS_NOT_FINITE", "lm_head.weight",
    ),
    "a linear's matrices on embeddings": (
        {f"{EMBED}.lora_A.weight": ones(4, C)}, {}, "TARGET_UNSUPPORTED", "embed_tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, case):
    more, config, reason, shown = CASES[case]
    error = refusal(tmp_path, more, **dict(config))
    assert error.reason == reason, error.message
    assert shown in error.message


def test_tying_matters_only_where_the_base_is_tied(tmp_path):
    more = {f"{HEAD}.lora_A.weight": ones(4, C), f"{HEAD}.lora_B.weight": ones(V, 4)}
    config = {"target_modules": ["lm_head"], "ensure_weight_tying": True}
    assert checked(tmp_path / "a", more, UNTIED, **dict(config)).spec.max_rank == 4
    error = refusal(tmp_path / "b", more, TIED, **dict(config))
    assert (error.reason, "ensure_weight_tying" in error.message) == ("OPTION_UNSUPPORTED", True)


LAYERS = {
    f"{START}model.layers.{layer}.self_attn.{module}": size
    for layer in range(2)
    for module, size in (("q_proj", 32), ("v_proj", 16))
}
HEAD_PAIR = {f"{HEAD}.lora_A.weight": ones(4, C), f"{HEAD}.lora_B.weight": ones(V, 4)}
EMBED_PAIR = {f"{EMBED}.lora_embedding_A": ones(4, V), f"{EMBED}.lora_embedding_B": ones(C, 4)}
MAGNITUDES = {f"{name}.lora_magnitude_vector": ones(size) for name, size in LAYERS.items()}
BIASES = {f"{name}.lora_B.bias": ones(size) for name, size in LAYERS.items()}
VECTORS = {
    "head without a magnitude": (
        "lm_head", HEAD_PAIR | MAGNITUDES, {"use_dora": True}, "WEIGHTS_INVALID",
        "lora_magnitude_vector of lm_head",
    ),
    "embeddings without a magnitude": (
        "embed_tokens", EMBED_PAIR | MAGNITUDES, {"use_dora": True}, "WEIGHTS_INVALID",
        "lora_magnitude_vector of model.embed_tokens",
    ),
    "magnitude unasked": (
        "lm_head", HEAD_PAIR | {f"{HEAD}.lora_magnitude_vector": ones(V)}, {}, "OPTION_UNSUPPORTED",
        "use_dora false",
    ),
    "bias unasked": (
        "lm_head", HEAD_PAIR | {f"{HEAD}.lora_B.bias": ones(V)}, {}, "OPTION_UNSUPPORTED",
        "lora_bias false",
    ),
    "head without its bias": (
        "lm_head", HEAD_PAIR | BIASES, {"lora_bias": True}, "WEIGHTS_INVALID",
        "lora_B.bias of lm_head",
    ),
    "bias on embeddings": (
        "embed_tokens", EMBED_PAIR | BIASES, {"lora_bias": True}, "OPTION_UNSUPPORTED", "lora_bias",
    ),
    "magnitude of another size": (
        "embed_tokens",
        EMBED_PAIR | MAGNITUDES | {f"{EMBED}.lora_magnitude_vector": ones(V)},
        {"use_dora": True}, "BASE_MODEL_MISMATCH", f"{EMBED}.lora_magnitude_vector",
    ),
    "magnitude as a matrix": (
        "lm_head", HEAD_PAIR | MAGNITUDES | {f"{HEAD}.lora_magnitude_vector": ones(1, V)},
        {"use_dora": True}, "WEIGHTS_INVALID", "1-D",
    ),
    "magnitude of a module that is no target": (
        "q_proj", {f"{HEAD}.lora_magnitude_vector": ones(V)}, {}, "TARGET_UNSUPPORTED", HEAD,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VECTORS)
def test_gains_and_constants_of_the_vocabulary_are_refused_by_name(tmp_path, case):
    module, more, config, reason, shown = VECTORS[case]
    error = refusal(tmp_path, more, target_modules=[module], **config)
    assert error.reason == reason, error.message
    assert shown in error.message
