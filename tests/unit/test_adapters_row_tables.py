"""Tables of one row a token in packed files: every row is where the offsets say."""

from __future__ import annotations

import numpy as np
import pytest

from engine_svc.adapters.packer import plan_packing, write_packed
from engine_svc.layout import OFFSET_UNIT, TABLES, adapter_layout, smallest_page_size
from engine_svc.model.site_table import slot_row
from engine_svc.packed import PackedFileInvalid, check_packed, decode_header, encode_header
from loraplex.adapter_format import check_adapter, read_folder
from tests.support.tiny_adapters import adapter_tensors, tiny_base, write_adapter

V, C, RANK = 1000, 32, 5
EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
BASE = tiny_base(vocab_size=V, tie_word_embeddings=False)
TIED = tiny_base(vocab_size=V)
RNG = np.random.default_rng(0)
SAVED = {f"{HEAD}.weight": RNG.normal(size=(V, C)).astype("float32")}
LORA = {
    f"{EMBED}.lora_embedding_A": RNG.normal(size=(RANK, V)).astype("float32"),
    f"{EMBED}.lora_embedding_B": RNG.normal(size=(C, RANK)).astype("float32"),
}
COPY = {f"{EMBED}.base_layer.weight": RNG.normal(size=(V, C)).astype("float32")}
MODULES = {"target_modules": ["q_proj", "v_proj", "embed_tokens"], "r": RANK}


def layout_of(base=BASE):
    return adapter_layout(base.spec, smallest_page_size(base.spec, "float32", 1), "float32")


def packed(folder, more, base=BASE, **config):
    tensors = {**adapter_tensors(base.spec, rank=RANK), **more}
    files = read_folder(write_adapter(folder, tensors=tensors, config=config)).files
    spec = check_adapter(files, base).spec
    layout = layout_of(base)
    plan = plan_packing(spec.parts, layout, "d")
    out = memoryview(bytearray(b"\xaa" * plan.num_bytes))
    write_packed(plan, files["adapter_model.safetensors"], out)
    header = decode_header(out, layout.digest)
    check_packed(out, header, layout)
    return out, header, layout


def rows_of(out, header, layout, name, row_items):
    """The whole table, through its offsets alone; no run may cross the end of its page."""
    found, step = [], layout.table_rows_a_page(row_items)
    for index, offset in enumerate(header.arrays[f"{name}_off"].tolist()):
        rows = min(step, V - index * step)
        start, size = offset * OFFSET_UNIT, rows * row_items * 4
        assert start // layout.page_bytes == (start + size - 1) // layout.page_bytes
        begin = header.image_offset + start
        found.append(np.frombuffer(out[begin : begin + size], "<f4").reshape(rows, row_items))
    return np.concatenate(found)


def test_every_row_of_every_table_lies_at_its_offset(tmp_path):
    more = {**SAVED, **LORA, **COPY}
    out, header, layout = packed(tmp_path, more, **MODULES, modules_to_save=["lm_head"])
    assert len(header.arrays["head_weight_off"]) > 1
    np.testing.assert_array_equal(
        rows_of(out, header, layout, "head_weight", C), SAVED[f"{HEAD}.weight"]
    )
    np.testing.assert_array_equal(
        rows_of(out, header, layout, "embedding_a", RANK), LORA[f"{EMBED}.lora_embedding_A"].T
    )
    np.testing.assert_array_equal(
        rows_of(out, header, layout, "embedding_weight", C), COPY[f"{EMBED}.base_layer.weight"]
    )
    used = sum(
        tensor.nbytes
        for tensor in [*more.values(), *adapter_tensors(BASE.spec, rank=RANK).values()]
    )
    assert header.used_bytes == used


def test_both_sides_of_a_tied_base_share_the_bytes_of_a_copy(tmp_path):
    _, header, _ = packed(tmp_path, {**LORA, **COPY}, TIED, **MODULES)
    arrays = header.arrays
    assert len(arrays["head_weight_off"])
    np.testing.assert_array_equal(arrays["head_weight_off"], arrays["embedding_weight_off"])


def test_an_adapter_without_tables_takes_no_room_for_them(tmp_path):
    _, header, layout = packed(tmp_path, {}, r=RANK)
    assert [len(header.arrays[f"{name}_off"]) for name in TABLES] == [0, 0, 0]
    assert header.num_pages * layout.page_bytes < V * C * 4


@pytest.mark.parametrize("name", TABLES)
def test_a_table_with_a_missing_run_is_no_packed_file(tmp_path, name):
    more = {**SAVED, **LORA, **COPY}
    _, header, layout = packed(tmp_path, more, **MODULES, modules_to_save=["lm_head"])
    pages = range(header.num_pages)
    slot_row(header, pages, layout)
    for change in (lambda runs: runs[:-1], lambda runs: np.where(runs == runs[0], -1, runs)):
        arrays = dict(header.arrays)
        arrays[f"{name}_off"] = change(arrays[f"{name}_off"])
        text = encode_header("d", layout.digest, header.num_pages, header.used_bytes, arrays)
        mangled = decode_header(memoryview(text), layout.digest)
        with pytest.raises(PackedFileInvalid, match=name):
            slot_row(mangled, pages, layout)
