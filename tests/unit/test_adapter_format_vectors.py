"""DoRA, biases and fused projections: what the check makes of their tensors, and where they lie."""

from __future__ import annotations

import numpy as np
import pytest

from engine_svc.adapters.packer import plan_packing, write_packed
from engine_svc.layout import OFFSET_UNIT, adapter_layout, smallest_page_size
from engine_svc.packed import RAW_BIAS, RAW_MAGNITUDE, check_packed, decode_header
from loraplex.adapter_format import adapter_parts, check_adapter, parse_manifest, read_folder
from loraplex.base_model import module_path
from tests.support.tiny_adapters import adapter_tensors, tiny_base, write_adapter

BASE = tiny_base(attention_bias=True)
RNG = np.random.default_rng(3)


def named(module: str, ending: str, layers=(0, 1), size: int | None = None):
    rows = size or BASE.spec.module_shape(module)[1]
    return {
        f"base_model.model.{module_path(layer, module)}.{ending}": RNG.normal(size=rows).astype(
            "f4"
        )
        for layer in layers
    }


def checked(folder, tensors, **config):
    files = read_folder(write_adapter(folder, tensors=tensors, config=config)).files
    return check_adapter(files, BASE), files


def packed(folder, tensors, **config):
    result, files = checked(folder, tensors, **config)
    layout = adapter_layout(BASE.spec, smallest_page_size(BASE.spec, "float32"), "float32")
    plan = plan_packing(result.spec.parts, layout, result.manifest.digest)
    out = memoryview(bytearray(b"\xaa" * plan.num_bytes))
    write_packed(plan, files["adapter_model.safetensors"], out)
    header = decode_header(out, layout.digest)
    check_packed(out, header, layout)
    return layout, header, out


def vector(out, header, offset: int, size: int):
    assert offset >= 0
    start = header.image_offset + offset * OFFSET_UNIT
    return np.frombuffer(out[start : start + 4 * size], "<f4")


@pytest.mark.parametrize("form", ["", ".weight", ".default", ".default.weight"])
def test_magnitudes_are_read_in_every_form_in_which_peft_has_saved_them(tmp_path, form):
    tensors = adapter_tensors(BASE.spec)
    for module in ("q_proj", "v_proj"):
        tensors |= named(module, f"lora_magnitude_vector{form}")
    result, files = checked(tmp_path / "a", tensors, use_dora=True)
    assert all(target.magnitude is not None for target in result.spec.targets)
    assert result.report.notes == ("4 modules weight-decomposed (DoRA)",)
    assert result.spec.parameter_count == sum(tensor.size for tensor in tensors.values())
    options = parse_manifest(result.manifest.canonical_json).options
    assert options.use_dora
    # what the engine reads after the download is what was checked
    weights = files["adapter_model.safetensors"]
    assert adapter_parts(options, weights, BASE) == result.spec.parts


@pytest.mark.parametrize("form", ["lora_B.bias", "lora_B.default.bias"])
def test_biases_of_lora_are_added_with_the_scaling(tmp_path, form):
    tensors = adapter_tensors(BASE.spec, ["k_proj"])
    bias = named("k_proj", form)
    layout, header, out = packed(
        tmp_path / "a", tensors | bias, target_modules=["k_proj"], lora_bias=True
    )
    assert not header.arrays["raw"].any()
    assert (header.arrays["g_off"] == -1).all()
    expected = np.zeros(layout.sites[0].out_features, "f4")
    expected[32:48] = 2 * bias[f"base_model.model.{module_path(1, 'k_proj')}.{form}"]
    cell = layout.site_cell(1, 0)
    found = vector(out, header, int(header.arrays["c_off"][cell]), len(expected))
    np.testing.assert_array_equal(found, expected)


def test_biases_that_replace_and_magnitudes_are_marked_for_the_model(tmp_path):
    tensors = adapter_tensors(BASE.spec, ["q_proj"])
    magnitude = named("q_proj", "lora_magnitude_vector")
    biases = named("q_proj", "base_layer.bias") | named("o_proj", "bias")
    biases |= named("k_proj", "bias") | named("v_proj", "bias")
    layout, header, out = packed(
        tmp_path / "a", tensors | magnitude | biases,
        target_modules=["q_proj"], use_dora=True, bias="all",
    )  # fmt: skip
    by_module = {part.module: header.arrays["raw"][i] for i, part in enumerate(layout.slices)}
    assert by_module == {
        "q_proj": RAW_MAGNITUDE | RAW_BIAS, "k_proj": RAW_BIAS, "v_proj": RAW_BIAS,
        "o_proj": RAW_BIAS, "gate_proj": 0, "up_proj": 0, "down_proj": 0,
    }  # fmt: skip
    gain = vector(out, header, int(header.arrays["g_off"][0]), 64)
    first = magnitude[f"base_model.model.{module_path(0, 'q_proj')}.lora_magnitude_vector"]
    np.testing.assert_array_equal(gain, np.concatenate([first, np.ones(32, "f4")]))
    of_o = vector(out, header, int(header.arrays["c_off"][layout.site_cell(1, 1)]), 32)
    expected = biases[f"base_model.model.{module_path(1, 'o_proj')}.bias"]
    np.testing.assert_array_equal(of_o, expected)


def test_a_weight_decomposed_site_gets_room_for_a_constant_only_where_the_base_has_a_bias(tmp_path):
    tensors = adapter_tensors(BASE.spec, ["q_proj", "up_proj"])
    for module in ("q_proj", "up_proj"):
        tensors |= named(module, "lora_magnitude_vector")
    layout, header, _ = packed(
        tmp_path / "a", tensors, target_modules=["q_proj", "up_proj"], use_dora=True
    )
    for layer in range(layout.num_layers):
        for site, has_constant in ((0, True), (2, False)):
            cell = layout.site_cell(layer, site)
            assert header.arrays["g_off"][cell] >= 0
            assert (header.arrays["c_off"][cell] >= 0) == has_constant


@pytest.mark.parametrize(
    "targets", [r".*\.(qkv_proj|gate_proj|down_proj)", ["qkv_proj", "down_proj"]]
)
def test_a_model_that_fuses_one_linear_fuses_all_unless_a_tensor_says_otherwise(tmp_path, targets):
    """PEFT would find no gate_proj there."""
    tensors = adapter_tensors(BASE.spec, ["down_proj"])
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.qkv_proj"
        tensors[f"{name}.lora_A.weight"] = np.ones((4, 32), "f4")
        tensors[f"{name}.lora_B.weight"] = np.ones((64, 4), "f4")
    result, _ = checked(tmp_path / "a", tensors, target_modules=targets)
    assert {t.module for t in result.spec.targets} == {"q_proj", "k_proj", "v_proj", "down_proj"}
    tensors |= adapter_tensors(BASE.spec, ["up_proj"])
    config = {"target_modules": ["qkv_proj", "down_proj", "up_proj"]}
    result, _ = checked(tmp_path / "b", tensors, **config)
    assert "up_proj" in {t.module for t in result.spec.targets}


def test_one_fused_pair_is_three_modules_that_share_their_a(tmp_path):
    rank, rows = 20, 32 + 16 + 16
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.qkv_proj"
        tensors[f"{name}.lora_A.weight"] = RNG.normal(size=(rank, 32)).astype("f4")
        tensors[f"{name}.lora_B.weight"] = RNG.normal(size=(rows, rank)).astype("f4")
    config = {"target_modules": ["qkv_proj"], "r": rank}
    result, _ = checked(tmp_path / "a", tensors, **config)
    assert [(t.layer, t.module, t.row0, t.num_rows) for t in result.spec.targets[:3]] == [
        (0, "q_proj", 0, 32), (0, "k_proj", 32, 16), (0, "v_proj", 48, 16),
    ]  # fmt: skip
    assert sum(row.num_bytes for row in result.report.rows) == result.spec.weights_bytes
    assert result.spec.weights_bytes == sum(tensor.nbytes for tensor in tensors.values())
    layout, header, out = packed(tmp_path / "a", tensors, **config)
    assert header.used_bytes == result.spec.weights_bytes
    for layer in range(2):
        entries = [layout.entry(layer, index) for index in range(3)]
        a_off, b_off = header.arrays["a_off"][entries], header.arrays["b_off"][entries]
        assert (a_off == a_off[0]).all()
        assert header.arrays["rank"][entries].tolist() == [rank] * 3
        b = tensors[f"base_model.model.model.layers.{layer}.self_attn.qkv_proj.lora_B.weight"]
        k = vector(out, header, int(b_off[1, 1]), 4 * 16).reshape(4, 16)
        np.testing.assert_array_equal(k, b[32:48, 16:].T)
