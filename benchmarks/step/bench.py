"""One loaded model with random adapters in slots and every prompt computed: what steps run on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.shared import bandwidth
from benchmarks.shared.core_drive import SLOTS_A_PLACE
from benchmarks.shared.made_models import SHAPES, write_model_folder
from benchmarks.shared.packed_adapters import AdapterRegion, MemoryFile, PackedAdapter
from benchmarks.step import checks
from benchmarks.step.cases import Case, Size
from benchmarks.step.driver import Decoded, StepDriver
from benchmarks.step.floor import StepFloor, release
from engine_svc.model.build import LoadedModel, ModelOptions, load_model


@dataclass
class Bench:
    """`failures` collects what no run may show; see checks."""

    size: Size
    model: LoadedModel
    driver: StepDriver
    region: AdapterRegion
    memory: MemoryFile
    floor: StepFloor
    adapters: Mapping[str, tuple[PackedAdapter, ...]]
    slots: Mapping[str, tuple[int, ...]]
    load_s: float
    #: adapters from the host region to their slots
    copy_bytes_per_s: float
    failures: list[str] = field(default_factory=list)

    def decode(self, case: Case) -> Decoded:
        slots = case.slots(self.slots[case.ranks])
        decoded = self.driver.decode(slots)
        self.failures += checks.problems(case.title, slots, decoded.tokens)
        return decoded

    def floor_bytes(self, case: Case) -> int:
        """Of a step in the middle of the output."""
        context = self.size.prompt + self.size.output // 2
        used = [one.used_bytes for one in self.adapters[case.ranks][: len(case.groups)]]
        return self.floor.num_bytes([context] * case.batch, used)

    def close(self) -> None:
        self.model.slot_writer.close()
        self.memory.close()


def open_bench(
    scratch: Path,
    options: argparse.Namespace,
    size: Size,
    max_loras: int,
    ranks: Mapping[str, tuple[int, ...]],
    num_seqs: int,
    arena_gib: float,
) -> Bench:
    """Load the model with dummy weights, fill slots with adapters of `ranks`, compute prompts of
    `num_seqs` sequences."""
    model_dir = write_model_folder(scratch / "model", SHAPES[options.shape], tokenizer=False)
    memory = MemoryFile()
    # before the engine begins to watch for allocations
    floor_bytes_per_s = bandwidth.copy_bytes_per_s(options.device)
    release(options.device)
    began = time.perf_counter()
    model = load_model(
        model_dir,
        ModelOptions(
            host_region_path=str(memory.path),
            device=options.device,
            arena_bytes=int(arena_gib * 2**30),
            max_slots=max_loras * SLOTS_A_PLACE,
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.batched_tokens,
            context_tokens=options.context_tokens,
            load_format="dummy",
            static_buffers=options.static_buffers,
        ),
    )
    load_s = time.perf_counter() - began
    region = AdapterRegion(memory.path, model.base, model.layout)
    adapters = {name: region.write(of) for name, of in ranks.items()}
    driver = StepDriver(model, num_seqs, size.prompt, size.output)
    # the first load maps the region
    slots = {name: driver.load(ones[:1]) for name, ones in adapters.items()}
    began = time.perf_counter()
    for name, ones in adapters.items():
        slots[name] += driver.load(ones[1:])
    copied = sum(one.used_bytes for ones in adapters.values() for one in ones[1:])
    copy_bytes_per_s = copied / (time.perf_counter() - began)
    if options.prefill:
        driver.prefill([-1] * num_seqs, size.batched_tokens)
    else:
        driver.fill_prompts()
    floor = StepFloor.of(model, floor_bytes_per_s)
    return Bench(
        size, model, driver, region, memory, floor, adapters, slots, load_s, copy_bytes_per_s
    )
