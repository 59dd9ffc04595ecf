"""Other projects' Triton LoRA kernels on the same cell, where their files lie in a folder.

The folder holds a few files of the wheels, unchanged, under their own paths (docs/fragmentation.md
says which). They are imported without their packages: what they need from the rest is stood in for
here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.ops.clock import Clock
from benchmarks.ops.layers import ERROR_LIMIT, Layers
from benchmarks.ops.shapes import SCALE, Cell
from kernels.lora_tables import PREFILL_TILE_ROWS, RANK_BLOCK, TILE_ROWS

REPEATS = 7
#: SGLang's captured grids have this many segments
CAPTURED_SEGMENTS = 256
#: partial sums of SGLang's best form
SPLITS = 8
VLLM = "vllm.lora.ops.triton_ops"
SGLANG = "sglang.kernels.ops.lora.dense"
#: runs one pair: (site, x, y) → y changed in place
Pair = Callable[[int, torch.Tensor, torch.Tensor], None]


def best_peer(clock: Clock, layers: Layers, shape: Cell, folder: Path) -> float | None:
    """µs of the fastest right form for one layer's four sites, the caches flushed before each;
    every form is printed."""
    install(folder.resolve())
    weights = PeerWeights(layers, shape)
    found = []
    for name, pair in forms(layers, shape, weights):
        try:
            error = worst_error(clock, layers, pair)
            if not error < ERROR_LIMIT:
                print(f"   {name}: wrong, error {error:.2e}", flush=True)
                continue
            time = time_us(clock, layers, pair)
        except Exception as failure:  # another project's kernel: say so and go on
            print(f"   {name}: {type(failure).__name__}: {str(failure)[:120]}", flush=True)
            continue
        print(f"   {name}: {time:.1f} µs", flush=True)
        found.append(time)
    return min(found, default=None)


def time_us(clock: Clock, layers: Layers, pair: Pair) -> float:
    def work(with_pair: bool) -> None:
        for site, own in enumerate(layers.buffers):
            clock.flush()
            if with_pair:
                pair(site, own.x, own.out)

    with_us, flush_us = clock.times_us([lambda: work(True), lambda: work(False)], REPEATS)
    return median(with_us) - median(flush_us)


def worst_error(clock: Clock, layers: Layers, pair: Pair) -> float:
    """‖(y + delta) − fp32‖ / ‖delta‖, y being zero."""
    worst = 0.0
    for site, own in enumerate(layers.buffers):
        own.out.zero_()
        pair(site, own.x, own.out)
        torch.cuda.synchronize()
        expected = layers.expected(0, site)
        worst = max(worst, float((own.out.float() - expected).norm() / expected.norm()))
    return worst


class PeerWeights:
    """The first layer's weights as the peers store them: padded to the largest rank."""

    def __init__(self, layers: Layers, shape: Cell) -> None:
        adapters, self.rank = layers.adapters, max(shape.ranks)
        table, x = adapters.table, layers.buffers[0].x
        a_off, b_off = table.a_off.cpu(), table.b_off.cpu()
        count = max(8, len(shape.ranks))
        #: by site and slice: [S, 1, R, K] and [S, 1, N, R]
        self.a: list[list[torch.Tensor]] = []
        self.b: list[list[torch.Tensor]] = []
        #: by site: [S, slices · R, K], the true ranks side by side, and [S, N, R]
        self.a_rows: list[torch.Tensor] = []
        self.b_rows: list[torch.Tensor] = []
        for index, site in enumerate(adapters.sites):
            k, slices = site.in_features, len(site.widths)
            a = [x.new_zeros((count, 1, self.rank, k)) for _ in site.widths]
            b = [x.new_zeros((count, 1, width, self.rank)) for width in site.widths]
            a_rows = x.new_zeros((count, slices * self.rank, k))
            for slot, rank in enumerate(shape.ranks):
                for j, width in enumerate(site.widths):
                    entry = adapters.first_entry(0, index) + j
                    for r0 in range(0, rank, RANK_BLOCK):
                        rows = min(RANK_BLOCK, rank - r0)
                        at = (slot, entry, r0 // RANK_BLOCK)
                        part = table.block(int(a_off[at]), rows, k, x.dtype)
                        a[j][slot, 0, r0 : r0 + rows] = part
                        a_rows[slot, j * rank + r0 : j * rank + r0 + rows] = part
                        part = table.block(int(b_off[at]), rows, width, x.dtype)
                        b[j][slot, 0, :, r0 : r0 + rows] = part.T
            self.a.append(a)
            self.b.append(b)
            self.a_rows.append(a_rows)
            self.b_rows.append(torch.cat([each[:, 0] for each in b], dim=1).contiguous())


def forms(layers: Layers, shape: Cell, weights: PeerWeights) -> Iterator[tuple[str, Pair]]:
    """Names and calls; what they need once a step is made here."""
    yield "vLLM", vllm_pair(layers, shape, weights)
    chunk = PREFILL_TILE_ROWS if shape.is_prefill else TILE_ROWS
    yield "SGLang as served", sglang_pair(layers, shape, weights, chunk, not shape.is_prefill, None)
    yield "SGLang, splits", sglang_pair(layers, shape, weights, chunk, False, SPLITS)


def vllm_pair(layers: Layers, shape: Cell, weights: PeerWeights) -> Pair:
    kept = importlib.import_module(f"{VLLM}.utils")
    for pointers in (kept._LORA_A_PTR_DICT, kept._LORA_B_PTR_DICT):
        pointers.clear()  # of weights that are gone
    shrink = importlib.import_module(f"{VLLM}.lora_shrink_op")._lora_shrink
    expand = importlib.import_module(f"{VLLM}.lora_expand_op")._lora_expand
    metadata = importlib.import_module(f"{VLLM}.lora_kernel_metadata").LoRAKernelMeta
    device = layers.buffers[0].x.device
    meta = metadata.make(len(weights.a[0][0]), shape.tokens, device)
    meta.prepare_tensors(layers.adapters.row_slot)
    arguments = meta.meta_args(shape.tokens, False)
    buffers = [
        torch.empty((len(site.widths), shape.tokens, weights.rank), device=device)
        for site in layers.adapters.sites
    ]

    def pair(site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        shrink(x, weights.a[site], buffers[site], *arguments, SCALE)
        expand(buffers[site], weights.b[site], y, *arguments, offset_start=0, add_inputs=True)

    return pair


def sglang_pair(
    layers: Layers,
    shape: Cell,
    weights: PeerWeights,
    chunk: int,
    padded: bool,
    splits: int | None,
) -> Pair:
    shrink = importlib.import_module(f"{SGLANG}.chunked_sgmv_shrink")
    expand = importlib.import_module(f"{SGLANG}.chunked_sgmv_expand")
    device, slots, ends = layers.buffers[0].x.device, [], [0]
    for slot, rows in enumerate(shape.rows):
        for done in range(0, rows, chunk):
            slots.append(slot)
            ends.append(ends[-1] + min(chunk, rows - done))
    live = len(slots)
    if padded and live < CAPTURED_SEGMENTS:
        slots += [0] * (CAPTURED_SEGMENTS - live)
        ends += [ends[-1]] * (CAPTURED_SEGMENTS - live)

    def whole(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    count = len(weights.a[0][0])
    ranks = list(shape.ranks) + [0] * (count - len(shape.ranks))
    batch = SimpleNamespace(
        use_cuda_graph=padded, bs=shape.tokens, num_segments=live, seg_indptr=whole(ends),
        weight_indices=whole(slots), lora_ranks=whole(ranks), max_len=chunk, seg_lens=None,
        scalings=torch.full((count,), SCALE, device=device),
        permutation=torch.arange(shape.tokens, dtype=torch.int32, device=device),
    )  # fmt: skip
    starts = [
        torch.tensor([0, *site.widths]).cumsum(0).to(torch.int32) for site in layers.adapters.sites
    ]
    on_device = [each.to(device) for each in starts]

    def pair(site: int, x: torch.Tensor, y: torch.Tensor) -> None:
        widths = layers.adapters.sites[site].widths
        u = shrink.chunked_sgmv_lora_shrink_forward(
            x, weights.a_rows[site], batch, len(widths), split_k=splits
        )
        expand.chunked_sgmv_lora_expand_forward(
            u, weights.b_rows[site], batch, on_device[site], max(widths), y,
            slice_offsets_cpu=starts[site],
        )  # fmt: skip

    return pair


@dataclass(frozen=True)
class _Flag:
    """A setting of another project that is off."""

    def get(self) -> bool:
        return False


def install(folder: Path) -> None:
    """Make the folder's modules importable, once."""
    if "vllm.envs" in sys.modules:
        return
    for package in (VLLM, SGLANG):
        parts = package.split(".")
        for end in range(1, len(parts) + 1):
            _module(".".join(parts[:end]), __path__=[str(folder.joinpath(*parts[:end]))])
    off = {"VLLM_LORA_ENABLE_DUAL_STREAM": False, "VLLM_TUNED_CONFIG_FOLDER": None}
    off |= {"VLLM_BATCH_INVARIANT": False, "VLLM_LORA_DISABLE_PDL": True}
    _module("vllm.envs", **off)
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]
    _module("vllm.triton_utils", tl=tl, triton=triton)
    _module("vllm.logger", init_logger=lambda _: _Silent())
    platform = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda _: True)
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.utils", __path__=[])
    _module("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2)
    _module(
        "vllm.utils.torch_utils",
        direct_register_custom_op=_register_nothing,
        async_tensor_h2d=_to_device,
    )
    for name in ("sglang.srt", "sglang.srt.lora"):
        _module(name, __path__=[])
    flags = {
        name: _Flag()
        for name in ("SGLANG_ENABLE_LORA_CSGMV_SPLIT_K", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE")
    }
    _module("sglang.srt.environ", envs=SimpleNamespace(**flags))
    _module("sglang.srt.lora.utils", LoRABatchInfo=SimpleNamespace)
    _module(
        "sglang.srt.utils",
        cached_triton_kernel=lambda *_, **__: lambda kernel: kernel,
        get_device_name=lambda: torch.cuda.get_device_name(),
    )


class _Silent:
    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _register_nothing(*_: object, **__: object) -> None:
    raise AttributeError("no custom operators here")


def _to_device(values: Any, *rest: Any, **options: Any) -> torch.Tensor:
    """The values as a tensor on the device that is asked for."""
    dtype = options.get("dtype") or next((v for v in rest if isinstance(v, torch.dtype)), None)
    device = options.get("device") or options.get("target_device") or "cuda"
    return torch.as_tensor(values, dtype=dtype).to(device)


def _module(name: str, **members: object) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
