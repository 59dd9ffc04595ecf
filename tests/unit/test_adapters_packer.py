"""Packing: what lies at the offsets is A and B exactly, and blocks stay inside pages."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_svc.adapters.packer import plan_packing, write_packed
from engine_svc.layout import OFFSET_UNIT, RANK_BLOCK, adapter_layout, smallest_page_size
from engine_svc.packed import PackedFileInvalid, check_packed, decode_header
from loraplex.adapter_format import check_adapter, read_folder
from loraplex.base_model import LAYER_MODULES
from loraplex.status import AdapterRefused
from tests.support.tiny_adapters import adapter_tensors, tiny_base, write_adapter

BASE = tiny_base(num_hidden_layers=3)


def layout_of(dtype="float32", page_size=None, base=BASE):
    size = page_size or smallest_page_size(base.spec, dtype, 4)
    return adapter_layout(base.spec, size, dtype)


def packed(folder: Path, layout, base=BASE):
    files = read_folder(folder).files
    checked = check_adapter(files, base)
    plan = plan_packing(checked.spec.parts, layout, checked.manifest.digest)
    out = memoryview(bytearray(b"\xaa" * plan.num_bytes))
    write_packed(plan, files["adapter_model.safetensors"], out)
    header = decode_header(out, layout.digest)
    check_packed(out, header, layout)
    return out, header


def values(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (bits.view("<u2").astype("<u4") << 16).view("<f4")
    return bits.view({"float32": "<f4", "float16": "<f2"}[dtype]).astype("<f4")


def read_matrix(out, header, layout, entry, slice_, which):
    """A [rank, in] or rank-major B [rank, cols] of one entry, through the offsets alone."""
    rank = int(header.arrays["rank"][entry])
    cols = slice_.in_features if which == "a_off" else slice_.num_cols
    rows = []
    for block in range(-(-rank // RANK_BLOCK)):
        count = min(RANK_BLOCK, rank - block * RANK_BLOCK)
        start = int(header.arrays[which][entry, block]) * OFFSET_UNIT
        num_bytes = count * cols * layout.item_bytes
        assert start // layout.page_bytes == (start + num_bytes - 1) // layout.page_bytes
        begin = header.image_offset + start
        bits = np.frombuffer(out[begin : begin + num_bytes], np.uint8)
        rows.append(values(bits, layout.dtype).reshape(count, cols))
    return np.concatenate(rows)


def assert_holds(out, header, layout, tensors, round_to):
    for layer in range(layout.num_layers):
        for index, part in enumerate(layout.slices):
            entry = layout.entry(layer, index)
            names = [name for name in tensors if f"layers.{layer}." in name]
            names = [name for name in names if f".{part.module}." in name]
            if not names:
                assert header.arrays["rank"][entry] == 0
                assert (header.arrays["a_off"][entry] == -1).all()
                continue
            a, b = (round_to(tensors[name]) for name in sorted(names))
            cols = slice(part.module_col0, part.module_col0 + part.num_cols)
            np.testing.assert_array_equal(read_matrix(out, header, layout, entry, part, "a_off"), a)
            np.testing.assert_array_equal(
                read_matrix(out, header, layout, entry, part, "b_off"), b.T[:, cols]
            )


@settings(deadline=None, max_examples=40)
@given(
    ranks=st.fixed_dictionaries(
        {}, optional={module: st.sampled_from([1, 2, 15, 16, 17, 40]) for module in LAYER_MODULES}
    ).filter(bool),
    layers=st.sets(st.integers(0, 2), min_size=1),
    page_scale=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 100),
)
def test_offsets_give_back_every_matrix_exactly(ranks, layers, page_scale, seed):
    tensors = adapter_tensors(BASE.spec, list(ranks), sorted(layers), ranks, seed)
    config = {
        "target_modules": sorted(ranks),
        "rank_pattern": ranks,
        "layers_to_transform": sorted(layers),
    }
    layout = layout_of(page_size=smallest_page_size(BASE.spec, "float32", 4) * page_scale)
    with TemporaryDirectory() as folder:
        out, header = packed(write_adapter(Path(folder), tensors=tensors, config=config), layout)
    assert_holds(out, header, layout, tensors, lambda value: value)
    assert header.used_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("file_dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_pair_rounds_to_nearest(tmp_path, file_dtype, dtype):
    torch = pytest.importorskip("torch")
    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

    def round_to(value):
        stored = torch.from_numpy(value).to(names[file_dtype])
        return stored.to(getattr(torch, dtype)).float().numpy()

    tensors = adapter_tensors(BASE.spec, LAYER_MODULES)
    folder = write_adapter(
        tmp_path / "a",
        tensors=tensors,
        dtype=file_dtype,
        config={"target_modules": list(LAYER_MODULES)},
    )
    layout = layout_of(dtype)
    out, header = packed(folder, layout)
    assert_holds(out, header, layout, tensors, round_to)


def test_a_blocks_of_one_site_are_adjacent(tmp_path):
    folder = write_adapter(tmp_path / "a", BASE.spec, modules=LAYER_MODULES, rank=8)
    layout = layout_of(page_size=64)
    _, header = packed(folder, layout)
    a_off = header.arrays["a_off"]
    for layer in range(layout.num_layers):
        q, k, v = (int(a_off[layout.entry(layer, index), 0]) for index in range(3))
        step = 8 * BASE.spec.hidden_size * layout.item_bytes // OFFSET_UNIT
        assert (k - q, v - k) == (step, step)


def test_scale_and_true_rank_are_kept_apart_from_storage(tmp_path):
    folder = write_adapter(
        tmp_path / "a", BASE.spec, rank=3, config={"lora_alpha": 7, "use_rslora": True}
    )
    layout = layout_of()
    _, header = packed(folder, layout)
    entry = layout.entry(0, 0)
    assert header.arrays["rank"][entry] == 3
    assert header.arrays["scale"][entry] == np.float32(7 / 3**0.5)


def test_columns_that_do_not_fit_a_page_are_sliced(tmp_path):
    base = tiny_base(num_key_value_heads=1, num_attention_heads=2, intermediate_size=1040)
    layout = layout_of(page_size=smallest_page_size(base.spec, "float32", 1), base=base)
    one = adapter_layout(base.spec, smallest_page_size(base.spec, "float32", 1), "float32")
    assert one == layout
    tensors = adapter_tensors(base.spec, LAYER_MODULES, rank=20)
    folder = write_adapter(
        tmp_path / "a", tensors=tensors, config={"target_modules": list(LAYER_MODULES), "r": 20}
    )
    out, header = packed(folder, layout, base)
    assert_holds(out, header, layout, tensors, lambda value: value)


def test_value_beyond_the_arena_dtype_is_refused_by_tensor_name(tmp_path):
    tensors = adapter_tensors(BASE.spec)
    name = next(iter(tensors))
    tensors[name][0, 0] = 1e5
    with pytest.raises(AdapterRefused, match=r"lora_A.*float16"):
        packed(write_adapter(tmp_path / "a", tensors=tensors), layout_of("float16"))


def test_mangled_headers_are_an_error_not_a_crash(tmp_path):
    layout = layout_of()
    out, _ = packed(write_adapter(tmp_path / "a", BASE.spec), layout)
    refused = 0
    for position in range(0, 4000, 13):
        for value in (0x00, 0x39, 0x7D, 0xFF):
            mangled = bytearray(out)
            mangled[position] = value
            view = memoryview(mangled)
            try:
                check_packed(view, decode_header(view, layout.digest), layout)
            except PackedFileInvalid:
                refused += 1
    assert refused > 20


def test_truncated_packed_files_are_refused(tmp_path):
    layout = layout_of()
    out, _ = packed(write_adapter(tmp_path / "a", BASE.spec), layout)
    for length in (0, 5, 12, 100, 4096, len(out) - 1):
        with pytest.raises(PackedFileInvalid):
            check_packed(out[:length], decode_header(out[:length], layout.digest), layout)
