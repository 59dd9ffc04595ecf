"""g, c and g ⊙ B against the formulas in double precision, and what is cached and refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_svc.adapters.packer import plan_packing, write_packed
from engine_svc.layout import adapter_layout, smallest_page_size
from engine_svc.model import completion as module
from engine_svc.model.arena import Arena
from engine_svc.model.completion import Completion
from engine_svc.model.linear import Linear
from engine_svc.model.site_table import SlotRow, slot_row
from engine_svc.model.weights import LayerWeights, ModelWeights
from engine_svc.packed import decode_header
from loraplex.adapter_format import check_adapter, read_folder
from loraplex.base_model import module_path
from loraplex.status import AdapterRefused
from tests.support.tiny_adapters import adapter_tensors, tiny_base, write_adapter

BASE = tiny_base(attention_bias=True)
MODULES = ["k_proj", "down_proj"]
RANK = 19


@dataclass
class Loaded:
    arena: Arena
    completion: Completion
    row: SlotRow
    raw: np.ndarray
    tensors: dict[str, np.ndarray]
    weights: ModelWeights
    rests: list[float]
    images: np.ndarray

    def load(self) -> None:
        """Copy the page images again, as a second load of the adapter does."""
        self.arena.bytes[: len(self.images)] = torch.from_numpy(self.images)

    def of(self, layer: int, name: str, ending: str) -> torch.Tensor:
        key = f"base_model.model.{module_path(layer, name)}.{ending}"
        return torch.from_numpy(self.tensors[key])

    def vector(self, offset: int, size: int) -> torch.Tensor:
        return self.arena.bytes[offset * 16 : offset * 16 + 4 * size].view(torch.float32)


def base_weights(dtype: torch.dtype) -> ModelWeights:
    torch.manual_seed(0)
    spec, empty = BASE.spec, torch.empty(0)

    def linear(inputs: int, outputs: int, bias: bool) -> Linear:
        weight = torch.randn(outputs, inputs, dtype=dtype)
        return Linear(weight, torch.randn(outputs, dtype=dtype) if bias else None)

    layers = tuple(
        LayerWeights(
            empty, linear(32, 64, True), None, None, linear(32, 32, True), empty,
            linear(32, 96, False), linear(48, 32, False),
        )
        for _ in range(spec.num_layers)
    )  # fmt: skip
    return ModelWeights(empty, layers, empty, Linear(torch.empty(1, 1)), 0)


def loaded(folder: Path, dtype: str = "float32", **changes: np.ndarray) -> Loaded:
    rng = np.random.default_rng(1)
    tensors = adapter_tensors(BASE.spec, MODULES, rank=RANK)
    for layer in range(BASE.spec.num_layers):
        for name in MODULES:
            path = f"base_model.model.{module_path(layer, name)}"
            size = BASE.spec.module_shape(name)[1]
            tensors[f"{path}.lora_magnitude_vector"] = rng.normal(size=size).astype("f4")
        for name, ending in (("k_proj", "base_layer.bias"), ("q_proj", "bias"),
                             ("v_proj", "bias"), ("o_proj", "bias")):  # fmt: skip
            path = f"base_model.model.{module_path(layer, name)}.{ending}"
            tensors[path] = rng.normal(size=BASE.spec.module_shape(name)[1]).astype("f4")
    tensors.update(changes)
    config = {"r": RANK, "target_modules": MODULES, "use_dora": True, "bias": "all"}
    files = read_folder(write_adapter(folder / "a", tensors=tensors, config=config)).files
    checked = check_adapter(files, BASE)
    page_size = smallest_page_size(BASE.spec, dtype)
    layout = adapter_layout(BASE.spec, page_size, dtype)
    plan = plan_packing(checked.spec.parts, layout, checked.manifest.digest)
    out = bytearray(plan.num_bytes)
    write_packed(plan, files["adapter_model.safetensors"], memoryview(out))
    header = decode_header(memoryview(out), layout.digest)
    arena = Arena(BASE.spec, page_size, dtype, 1 << 21, torch.device("cpu"))
    weights, rests = base_weights(getattr(torch, dtype)), []
    completion = Completion(weights, arena, layout, rest=rests.append)
    row = slot_row(header, range(plan.num_pages), layout)
    images = np.frombuffer(bytes(out), np.uint8)[header.image_offset :].copy()
    found = Loaded(
        arena, completion, row, np.array(header.arrays["raw"]), tensors, weights, rests, images
    )
    found.load()
    return found


def gain_of(bench: Loaded, layer: int, name: str, dtype: torch.dtype) -> torch.Tensor:
    linear, rows = (
        (bench.weights.layers[layer].qkv, slice(32, 48))
        if name == "k_proj"
        else (bench.weights.layers[layer].down, slice(0, 32))
    )
    a, b = (bench.of(layer, name, f"lora_{m}.weight").to(dtype).double() for m in "AB")
    weight = linear.plain_weight()[rows].double() + 8 / RANK * b @ a
    return bench.of(layer, name, "lora_magnitude_vector").double() / weight.norm(dim=1)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_gains_constants_and_b_are_those_of_the_formulas(tmp_path, dtype, tolerance):
    bench = loaded(tmp_path, dtype)
    bench.completion.complete(bench.row, bench.raw)
    layout = bench.completion._layout
    for layer in range(BASE.spec.num_layers):
        gain = gain_of(bench, layer, "k_proj", getattr(torch, dtype))
        cell = layout.site_cell(layer, 0)
        found = bench.vector(int(bench.row.g_off[cell]), 64).double()
        assert torch.allclose(found[32:48], gain, rtol=1e-5)
        assert found[:32].eq(1).all()
        assert found[48:].eq(1).all()
        base_bias = bench.weights.layers[layer].qkv.bias
        assert base_bias is not None
        own = [bench.of(layer, "q_proj", "bias"), bench.of(layer, "k_proj", "base_layer.bias"),
               bench.of(layer, "v_proj", "bias")]  # fmt: skip
        constant = torch.cat(own).double() - found * base_bias.double()
        assert torch.allclose(bench.vector(int(bench.row.c_off[cell]), 64).double(), constant)
        entry = layout.entry(layer, 1)
        blocks = list(bench.completion._blocks(bench.row.b_off[entry], RANK, 16))
        expected = bench.of(layer, "k_proj", "lora_B.weight").T.double() * gain
        assert torch.allclose(torch.cat(blocks).double(), expected, rtol=tolerance, atol=1e-6)
        down = gain_of(bench, layer, "down_proj", getattr(torch, dtype))
        cell = layout.site_cell(layer, 3)
        assert bench.row.c_off[cell] == -1
        assert torch.allclose(bench.vector(int(bench.row.g_off[cell]), 32).double(), down)


def test_norms_in_small_chunks_are_the_same_and_rest_between_them(tmp_path, monkeypatch):
    whole = loaded(tmp_path / "whole")
    whole.completion.complete(whole.row, whole.raw)
    assert len(whole.rests) == len(MODULES) * BASE.spec.num_layers
    monkeypatch.setattr(module, "CHUNK_BYTES", 5 * 32 * 4)
    chunked = loaded(tmp_path / "chunked")
    chunked.completion.complete(chunked.row, chunked.raw)
    assert len(chunked.rests) > 2 * len(whole.rests)
    size = len(whole.images)
    assert torch.allclose(
        chunked.arena.bytes[:size].view(torch.float32), whole.arena.bytes[:size].view(torch.float32)
    )


def test_an_adapter_that_comes_back_needs_no_norms_and_gets_the_same_bytes(tmp_path):
    bench = loaded(tmp_path)
    bench.completion.complete(bench.row, bench.raw)
    first, rests = bench.arena.bytes.clone(), len(bench.rests)
    bench.load()
    assert not torch.equal(bench.arena.bytes, first)
    bench.completion.complete(bench.row, bench.raw)
    assert torch.equal(bench.arena.bytes, first)
    assert len(bench.rests) == rests


def test_kept_gains_are_bounded_and_the_oldest_go_first(tmp_path, monkeypatch):
    bench = loaded(tmp_path)
    monkeypatch.setattr(module, "CACHE_BYTES", 2 * (16 + 32) * 4 * 2)
    for digest in ("a", "b", "a", "c"):
        bench.load()
        row = SlotRow(
            digest,
            *(
                getattr(bench.row, name)
                for name in ("rank", "scale", "a_off", "b_off", "g_off", "c_off", "tables")
            ),
        )
        bench.completion.complete(row, bench.raw)
    assert list(bench.completion._cache) == ["a", "c"]


def test_a_row_without_length_is_refused_not_served_as_not_a_number(tmp_path):
    bench = loaded(tmp_path)
    for layer in bench.weights.layers:
        layer.down._weight = Linear(torch.zeros(32, 48))._weight
    zero = {
        f"base_model.model.{module_path(layer, 'down_proj')}.lora_B.weight": np.zeros(
            (32, RANK), "f4"
        )
        for layer in range(2)
    }
    other = loaded(tmp_path / "zero", **zero)
    completion = Completion(bench.weights, other.arena, bench.completion._layout)
    with pytest.raises(AdapterRefused, match="no length"):
        completion.complete(other.row, other.raw)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rehearsal_takes_every_way_of_a_completion_and_leaves_nothing_known(
    tmp_path, monkeypatch, dtype
):
    bench = loaded(tmp_path, dtype)
    layout, measured = bench.completion._layout, []
    measure = bench.completion._gain

    def gain(row: SlotRow, entry: int, *others: torch.Tensor) -> torch.Tensor:
        measured.append(entry)
        return measure(row, entry, *others)

    monkeypatch.setattr(bench.completion, "_gain", gain)
    bench.arena.bytes.fill_(0xFF)
    bench.completion.rehearse()
    # once each: the second time they are known
    assert measured == list(range(len(layout.slices)))
    assert not bench.completion._cache
    assert bench.arena.bytes[2 * bench.arena.page_bytes :].eq(0xFF).all()
    bench.load()
    bench.completion.complete(bench.row, bench.raw)
    cell = layout.site_cell(0, 0)
    found = bench.vector(int(bench.row.g_off[cell]), 64).double()[32:48]
    assert torch.allclose(found, gain_of(bench, 0, "k_proj", getattr(torch, dtype)), rtol=1e-5)
