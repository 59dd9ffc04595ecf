from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_svc.adapters.packer import plan_packing, write_packed
from engine_svc.layout import RANK_BLOCK, AdapterLayout, adapter_layout, smallest_page_size
from engine_svc.model.arena import Arena
from engine_svc.model.completion import Completion
from engine_svc.model.linear import Linear
from engine_svc.model.lora import KernelLora
from engine_svc.model.lora_views import ViewLora
from engine_svc.model.site_table import SiteTableRows
from engine_svc.model.slot_writer import ArenaSlotWriter
from engine_svc.model.weights import ModelWeights
from engine_svc.types import Failure, HostSpan, SlotLoad
from loraplex.adapter_format import check_adapter, read_folder
from loraplex.base_model import LAYER_MODULES, BaseModelSpec
from loraplex.status import FieldInvalid
from tests.support.tiny_adapters import BASE_NAME, tiny_base, write_adapter

CPU = torch.device("cpu")
MAX_RANK = 48
#: rank by module: none, odd ones, more than one block
RANKS = {"q_proj": 1, "k_proj": 16, "v_proj": 19, "gate_proj": 33, "up_proj": 2, "down_proj": 48}


def no_weights() -> ModelWeights:
    """Of a base that no plain adapter asks for."""
    empty = torch.empty(0)
    return ModelWeights(empty, (), empty, Linear(torch.empty(1, 1)), 0)


class Bench:
    """An arena, a site table and a slot writer over a region file with one packed adapter."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.base: BaseModelSpec = tiny_base().spec
        page_size = smallest_page_size(self.base, dtype)
        self.layout: AdapterLayout = adapter_layout(self.base, page_size, dtype)
        self.arena = Arena(self.base, page_size, dtype, 1 << 21, CPU)
        adapter = write_adapter(
            folder / "a", rank=RANKS, modules=tuple(RANKS),
            config={"r": 4, "rank_pattern": RANKS, "alpha_pattern": {"up_proj": 3}},
        )  # fmt: skip
        self.files = read_folder(adapter).files
        self.checked = check_adapter(self.files, tiny_base())
        self.digest = self.checked.manifest.digest
        plan = plan_packing(self.checked.spec.parts, self.layout, self.digest)
        self.packed = bytearray(plan.num_bytes)
        write_packed(plan, self.files["adapter_model.safetensors"], memoryview(self.packed))
        self.num_pages = plan.num_pages
        self.rows = SiteTableRows(self.arena.bytes, self.layout, 3, MAX_RANK)
        self.region = folder / "region"
        self.span = HostSpan(4096, len(self.packed))
        self.write_region()
        completion = Completion(no_weights(), self.arena, self.layout)
        self.writer = ArenaSlotWriter(self.arena, self.layout, self.region, MAX_RANK, completion)

    def write_region(self) -> None:
        self.region.write_bytes(bytes(4096) + bytes(self.packed))

    def load(self, **changes: object) -> tuple[SlotLoad, Failure | None]:
        # scattered pages, as a fragmented arena gives them
        pages = tuple(range(2 * self.num_pages - 1, 0, -2))
        load = replace(SlotLoad(1, self.digest, self.span, pages), **changes)  # type: ignore[arg-type]
        self.writer.start(load)
        deadline = time.monotonic() + 20
        while not (ended := self.writer.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return ended[0]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_arena_views_share_memory_and_pages_copy_and_clear(bench: Bench) -> None:
    arena = bench.arena
    base_address = arena.bytes.data_ptr()
    assert arena.numbers.data_ptr() == base_address
    assert base_address % 16 == 0
    arena.page(2).fill_(7)
    arena.page(5).fill_(255)
    arena.copy(2, 5)
    assert arena.page(5).eq(7).all()
    arena.clear([2])
    per_page = arena.page_bytes // 4
    assert arena.numbers[2 * per_page : 3 * per_page].eq(0).all()
    assert arena.page(5).eq(7).all()


def test_an_arena_smaller_than_a_page_is_refused_with_the_limit(bench: Bench) -> None:
    with pytest.raises(FieldInvalid, match=f"arena_bytes is 17.*{bench.arena.page_bytes}"):
        Arena(bench.base, bench.arena.page_size, "float32", 17, CPU)


def test_slot_writer_copies_page_images_and_only_into_its_pages(bench: Bench) -> None:
    bench.arena.bytes.fill_(0xA5)
    load, failure = bench.load()
    assert failure is None
    images = np.frombuffer(bench.packed, np.uint8)[-bench.num_pages * bench.arena.page_bytes :]
    for index, page_id in enumerate(load.page_ids):
        start = index * bench.arena.page_bytes
        expected = images[start : start + bench.arena.page_bytes]
        assert np.array_equal(bench.arena.page(page_id).numpy(), expected)
    untouched = set(range(bench.arena.num_pages)) - set(load.page_ids)
    assert all(bench.arena.page(page_id).eq(0xA5).all() for page_id in untouched)


class FakeLoads:
    """gpu.PageLoads whose copies are under way until `finish`."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def reserve(self, num_bytes: int, small_bytes: int) -> None:
        self.events.append(f"reserved on {threading.current_thread().name}")

    def lock(self, region: object) -> None:
        self.events.append("lock begun")

    def wait_for_lock(self) -> bool:
        self.events.append("locked")
        return True

    def write(self, page_ids: Sequence[int], images: object) -> None:
        self.events.append("copies started")

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def finish(self) -> None:
        self.events.append("copies done")


def test_a_load_that_fails_beside_the_steps_is_told_after_its_copies_are_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = FakeLoads()
    monkeypatch.setattr(bench.writer, "_loads", loads)

    def complete(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(bench.writer._completion, "complete", complete)
    _, failure = bench.load()
    assert failure is not None
    assert loads.events == ["copies started", "copies done"]


def test_before_serving_the_thread_that_loads_rehearses_and_its_failure_stops_the_start(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = FakeLoads()
    for owner in (bench.writer, bench.writer._region):
        monkeypatch.setattr(owner, "_loads", loads)

    def rehearse() -> None:
        loads.events.append(f"rehearsed on {threading.current_thread().name}")
        if loads.events.count("locked") > 1:
            raise MemoryError

    monkeypatch.setattr(bench.writer._completion, "rehearse", rehearse)
    bench.writer.lock_early()
    bench.writer.warm_up()
    once = [
        "lock begun",
        "locked",
        "reserved on slot-writer",
        "rehearsed on slot-writer",
        "copies done",
    ]
    assert loads.events == once
    loads.events.append("locked")
    with pytest.raises(MemoryError):
        bench.writer.warm_up()
    assert bench.load()[1] is None


def test_a_failed_load_names_the_cause_and_the_writer_goes_on(bench: Bench) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"digest": "sha256:other"}, "it holds"),
        ({"page_ids": (1,)}, "page ids"),
        ({"span": HostSpan(4096, 1 << 40)}, "leaves the host region"),
        ({"span": HostSpan(0, 4096)}, "magic"),
        ({"span": HostSpan(4096, len(bench.packed) - 4096)}, "page images end"),
    ]
    for changes, expected in cases:
        _, failure = bench.load(**changes)
        assert failure is not None, changes
        assert failure.code == "DATA_LOSS"
        assert expected in failure.message
        with pytest.raises(KeyError):
            bench.writer.take_row(1, bench.digest)
    assert bench.load()[1] is None


def test_a_missing_host_region_fails_the_load_alone_and_is_logged_with_its_stack(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.region.unlink()
    _, failure = bench.load()
    assert failure is not None
    assert failure.code == "INTERNAL"
    assert str(bench.region) not in failure.message
    assert "FileNotFoundError" in caplog.text
    bench.write_region()
    assert bench.load()[1] is None


def test_offsets_that_leave_the_adapters_pages_are_refused(bench: Bench) -> None:
    from engine_svc.packed import decode_header

    header = decode_header(memoryview(bench.packed), bench.layout.digest)
    wrong = np.frombuffer(bench.packed, "<i8")
    offsets = header.arrays["a_off"]
    place = int(offsets.__array_interface__["data"][0] - wrong.__array_interface__["data"][0])
    last = place + offsets.nbytes - 8 * offsets.shape[1]
    bench.packed[last : last + 8] = (1 << 40).to_bytes(8, "little")
    bench.write_region()
    _, failure = bench.load()
    assert failure is not None
    assert "a_off" in failure.message


def test_a_binding_takes_each_row_once(bench: Bench) -> None:
    bench.load()
    row = bench.writer.take_row(1, bench.digest)
    bench.rows.write(1, row)
    assert bench.rows.digest(1) == bench.digest
    assert bench.rows.rank_blocks.tolist() == [0, -(-max(RANKS.values()) // RANK_BLOCK), 0]
    with pytest.raises(KeyError):
        bench.writer.take_row(1, bench.digest)


def test_a_cleared_row_is_poisoned_and_a_shorter_one_leaves_no_rest(bench: Bench) -> None:
    bench.load()
    row = bench.writer.take_row(1, bench.digest)
    bench.rows.write(1, row)
    table = bench.rows.table
    assert int(table.rank[1].max()) == 48
    short = replace(row, a_off=row.a_off[:, :1], b_off=row.b_off[:, :1])
    bench.rows.write(1, short)
    assert table.a_off[1, :, 1:].eq(-1).all()
    sites = bench.layout.sites
    for layer in range(bench.base.num_layers):
        for index, site in enumerate(sites):
            entry = bench.layout.entry(layer, site.first_slice)
            some = bool(table.rank[1, entry : entry + site.num_slices].gt(0).any())
            assert bool(table.live[1, bench.layout.site_cell(layer, index)]) == some
    assert 0 < int(table.live[1].sum()) < table.live.shape[1]
    bench.rows.clear(1)
    assert table.live.eq(0).all()
    for offsets in (table.a_off, table.b_off, table.g_off, table.c_off):
        assert offsets[1].eq(-1).all()
    assert table.rank[1].eq(0).all()
    assert table.scale[1].eq(0).all()
    assert bench.rows.digest(1) == ""
    assert not bench.rows.rank_blocks.any()


def test_cached_views_and_kernels_add_what_the_dense_matrices_add(bench: Bench) -> None:
    bench.load()
    row = bench.writer.take_row(1, bench.digest)
    bench.rows.write(1, row)
    kernels = KernelLora(bench.rows, bench.layout, max_tokens=64, num_slots=3)
    views = ViewLora(bench.arena.numbers, bench.layout, num_slots=3)
    views.bind(1, row)
    weights = np.memmap(bench.files["adapter_model.safetensors"], np.uint8, "r")
    dense = {
        (target.layer, target.module): (
            target.scaling, _matrix(weights, target.b) @ _matrix(weights, target.a)
        )
        for target in bench.checked.spec.targets
    }  # fmt: skip
    segments = [(0, 3, 1), (3, 4, -1)]
    generator = torch.Generator().manual_seed(0)
    changed = 0
    for layer in range(bench.base.num_layers):
        for site, shape in enumerate(bench.layout.sites):
            x = torch.randn(7, shape.in_features, generator=generator)
            y = torch.randn(7, shape.out_features, generator=generator)
            expected = y.clone()
            for part in bench.layout.slices[shape.first_slice :][: shape.num_slices]:
                if (layer, part.module) in dense:
                    scaling, product = dense[layer, part.module]
                    span = slice(part.module_col0, part.module_col0 + part.num_cols)
                    columns = slice(part.col0, part.col0 + part.num_cols)
                    expected[:3, columns] += scaling * (x[:3] @ product[span].T)
                    changed += 1
            for lora in (kernels, views):
                lora.begin(segments)
                found = y.clone()
                lora.add(layer, site, x, found)
                assert torch.allclose(found, expected, atol=2e-4, rtol=1e-5)
                assert torch.equal(found[3:], y[3:])
    assert changed == len(RANKS) * bench.base.num_layers
    assert len(LAYER_MODULES) > len(RANKS), "one module stays without LoRA"
    assert BASE_NAME == "tiny-base"


def test_a_gain_and_a_constant_change_the_rows_of_their_slot(bench: Bench) -> None:
    bench.load()
    row = bench.writer.take_row(1, bench.digest)
    free = bench.num_pages * 2 + 1
    units = bench.arena.page_bytes // 16
    width = bench.layout.sites[1].out_features
    vectors = bench.arena.page(free).view(torch.float32)
    vectors[: 2 * width] = torch.randn(2 * width, generator=torch.Generator().manual_seed(0))
    row.g_off[1], row.c_off[1] = free * units, free * units + width * 4 // 16
    bench.rows.write(1, row)
    assert bench.rows.table.live[1, 1] == 1, "a constant alone"
    views = ViewLora(bench.arena.numbers, bench.layout, num_slots=3)
    views.bind(1, row)
    kernels = KernelLora(bench.rows, bench.layout, max_tokens=64, num_slots=3)
    x, y = torch.randn(4, bench.layout.sites[1].in_features), torch.randn(4, width)
    for lora in (kernels, views):
        lora.begin([(0, 2, 1), (2, 2, -1)])
        found = y.clone()
        lora.add(0, 1, x, found)
        # o_proj has no LoRA here: gain and constant alone
        assert torch.allclose(found[:2], y[:2] * vectors[:width] + vectors[width : 2 * width])
        assert torch.equal(found[2:], y[2:])


def _matrix(weights: np.ndarray, locator: object) -> torch.Tensor:
    start, shape = locator.offset, locator.shape  # type: ignore[attr-defined]
    data = weights[start : start + 4 * shape[0] * shape[1]].view("<f4").reshape(shape)
    return torch.from_numpy(np.array(data))
