"""`make bench-memory`: what an adapter takes of the engine's memory, and how fast it gets there.

The 8B shape in bf16, arena pages of 16 positions (2 MiB): the engine on a GPU. Speeds are bytes of
the file for each second of processor time of the one thread that packs, into memory that is already
there, from a file in the page cache.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.shared.harness import PARTIAL, RESULTS, Recorder
from benchmarks.shared.made_adapters import BASE_8B, write_adapter
from benchmarks.shared.process_memory import MIB
from engine_svc.adapters.packer import PackPlan, plan_packing, write_packed
from engine_svc.layout import AdapterLayout, adapter_layout
from examples.demo_stack import MODEL_DIR, MODEL_NAME, convert_model
from loraplex.adapter_format import CONFIG_FILE, WEIGHTS_FILE, BaseModelFacts, adapter_parts
from loraplex.adapter_format.options import LoraOptions, parse_adapter_config
from loraplex.base_folder import read_base_folder

PAGE_SIZE = 16
PACKED_RANKS = (8, 16, 64)
USUAL_RANKS = (4, 8, 16, 32, 64)
COUNTED_RANKS = range(4, 65)
ROUNDS = 7
GIGA = 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few rounds; rows go elsewhere")
    options = parser.parse_args()
    rounds = 2 if options.quick else ROUNDS
    recorder = Recorder("memory", results=PARTIAL if options.quick else RESULTS)
    with tempfile.TemporaryDirectory(prefix="lpx-bench-") as scratch:
        folder = Path(scratch)
        measure_packing(recorder, folder, rounds)
        measure_bytes(recorder, folder)
        measure_saved(recorder, folder)
    return recorder.finish()


def measure_packing(recorder: Recorder, folder: Path, rounds: int) -> None:
    """Header, shapes, placement and copy; then the two other passes over the bytes of a load."""
    for rank in PACKED_RANKS:
        adapter = write_adapter(folder / f"rank-{rank}", rank)
        num_bytes = (adapter / WEIGHTS_FILE).stat().st_size
        for dtype in ("bfloat16", "float32") if rank == 16 else ("bfloat16",):
            layout = adapter_layout(BASE_8B.spec, PAGE_SIZE, dtype)
            samples = [num_bytes / GIGA / s for s in _pack_seconds(adapter, layout, rounds)]
            name = "bf16" if dtype == "bfloat16" else "bf16 to fp32"
            case = f"parse and pack, {name}, rank {rank}"
            recorder.add(case, samples, "GB/s", better="higher")
    data = (folder / "rank-16" / WEIGHTS_FILE).read_bytes()
    seconds = [_cpu_s(lambda: hashlib.sha256(data).digest()) for _ in range(rounds)]
    rates = [len(data) / GIGA / one for one in seconds]
    recorder.add("SHA-256 of the download", rates, "GB/s", better="higher")


def measure_bytes(recorder: Recorder, folder: Path) -> None:
    """What whole pages cost: usual ranks fill them, odd ones leave a part of the last."""
    layout = adapter_layout(BASE_8B.spec, PAGE_SIZE, "bfloat16")
    ratios, beyond = {}, {}
    for rank in COUNTED_RANKS:
        plan = _plan(write_adapter(folder / "hole", rank, seed=None), BASE_8B, layout)
        ratios[rank] = plan.num_pages * layout.page_bytes / plan.used_bytes
        beyond[rank] = plan.num_pages - math.ceil(plan.used_bytes / layout.page_bytes)
    usual = [max(ratios[rank] for rank in USUAL_RANKS)]
    names = ", ".join(str(rank) for rank in USUAL_RANKS)
    span = f"rank {COUNTED_RANKS[0]}-{COUNTED_RANKS[-1]}"
    worst, most = [max(ratios.values())], [float(max(beyond.values()))]
    recorder.add(f"bytes taken / used, ranks {names}", usual, "×", better="lower")
    recorder.add(f"bytes taken / used, worst {span}", worst, "×", better="lower")
    recorder.add(f"pages beyond the fewest, worst {span}", most, "pages", better="lower")


def measure_saved(recorder: Recorder, folder: Path) -> None:
    """Whole modules beside LoRA of rank 16: what one costs more."""
    convert_model()
    demo = read_base_folder(MODEL_DIR, MODEL_NAME)[0]
    for name, base, dtype in (("8B shape", BASE_8B, "bfloat16"), ("demo model", demo, "float32")):
        layout = adapter_layout(base.spec, PAGE_SIZE, dtype)
        taken: dict[tuple[str, ...], float] = {}
        for saved in ((), ("lm_head",), ("embed_tokens", "lm_head")):
            adapter = write_adapter(folder / "hole", 16, base, saved=saved, seed=None)
            taken[saved] = _plan(adapter, base, layout).num_pages * layout.page_bytes / MIB
        recorder.add(f"LoRA of rank 16, {name}, {dtype}", [taken[()]], "MiB", better="lower")
        for saved in (("lm_head",), ("embed_tokens", "lm_head")):
            more = taken[saved] - taken[()]
            case = f"{' + '.join(saved)} whole, {name}, {dtype}"
            recorder.add(case, [more], "MiB", better="lower")


def _pack_seconds(adapter: Path, layout: AdapterLayout, rounds: int) -> list[float]:
    """Seconds of processor time of each round after one that brings the pages of memory."""
    weights = adapter / WEIGHTS_FILE
    options = _options(adapter)
    out = memoryview(bytearray(_plan(adapter, BASE_8B, layout).num_bytes))

    def pack() -> None:
        parts = adapter_parts(options, weights, BASE_8B)
        write_packed(plan_packing(parts, layout, "sha256:" + "0" * 64), weights, out)

    pack()
    return [_cpu_s(pack) for _ in range(rounds)]


def _plan(adapter: Path, base: BaseModelFacts, layout: AdapterLayout) -> PackPlan:
    # the registry's limit for whole modules is a setting; here it does not bind
    parts = adapter_parts(_options(adapter), adapter / WEIGHTS_FILE, base, max_saved_bytes=1 << 62)
    return plan_packing(parts, layout, "sha256:" + "0" * 64)


def _options(adapter: Path) -> LoraOptions:
    return parse_adapter_config((adapter / CONFIG_FILE).read_bytes())[0]


def _cpu_s(action: Callable[[], object]) -> float:
    began = time.thread_time()
    action()
    return time.thread_time() - began


if __name__ == "__main__":
    sys.exit(main())
