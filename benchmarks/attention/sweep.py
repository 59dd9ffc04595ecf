"""Tries tuning candidates of the attention kernels: a case at a time, best first."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention.cases import TOLERANCE, Batch, Case, Shape, make_batch
from benchmarks.attention.replays import measure
from kernels.attention_tuning import DecodeTuning, PrefillTuning, decode_tuning
from kernels.decode_attention import DecodeScratch
from kernels.decode_attention_triton import decode_attention_triton
from kernels.prefill_attention import tile_rows
from kernels.prefill_attention_triton import prefill_attention_triton

SHOWN = 6
REPLAYS = 5
LAYERS = {"decode": 16, "prefill": 2}
#: of the time, for compiling
COMPILING = 0.45
#: (block_n, num_warps, num_stages)
DECODE_KERNELS = (
    (64, 4, 3), (64, 4, 2), (64, 4, 4), (128, 8, 2), (32, 4, 4), (32, 2, 4), (64, 8, 3),
    (128, 4, 2), (64, 2, 2), (32, 4, 3), (32, 2, 3), (64, 8, 2), (64, 2, 3), (128, 8, 3),
    (128, 4, 3), (32, 4, 6),
)  # fmt: skip
SPLITS = (1, 2, 4, 8, 16, 32, 64)
MIN_CHUNKS = (32, 64, 128, 256, 1024, 4096)
PREFILL_KERNELS = tuple(
    PrefillTuning(*candidate)
    for candidate in (
        (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 2), (128, 64, 8, 4),
        (64, 32, 4, 4), (64, 128, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 32, 8, 4),
    )
)  # fmt: skip


def sweep(
    cases: Sequence[Case], shape: Shape, pages: torch.Tensor, seconds: float, out: Path | None
) -> int:
    """Compile, then give every case its share of the time; what did not fit is not tried."""
    began = time.monotonic()
    end = began + seconds
    batches = [make_batch(case, shape, pages) for case in cases]
    kernels = _compile(batches, began + COMPILING * seconds)
    print(f"{len(kernels)} kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    lines: list[dict[str, Any]] = []
    for index, batch in enumerate(batches):
        until = time.monotonic() + (end - time.monotonic()) / (len(cases) - index)
        found = list(_candidates(batch, kernels, until))
        found.sort(key=lambda line: float(line["us"]))
        lines += found
        floor = batch.case.kv_bytes(shape)
        print(f"{batch.case.name}: {len(found)} candidates, {floor / 1e6:.1f} MB of K and V")
        for line in found[:SHOWN]:
            print(f"    {line['us']:9.2f} µs  {line['tuning']}", flush=True)
    if out is not None:
        out.write_text(
            "".join(json.dumps(_plain(line), ensure_ascii=False) + "\n" for line in lines)
        )
    return 0


def _compile(batches: Sequence[Batch], until: float) -> list[DecodeTuning | PrefillTuning]:
    """Those that compiled in time and fit the GPU; decode and prefill kernels in turn."""
    decodes = [batch for batch in batches if _is_decode(batch)]
    prefills = [batch for batch in batches if not _is_decode(batch)]
    wanted: list[tuple[Batch, DecodeTuning | PrefillTuning]] = []
    for kernel, tuning in itertools.zip_longest(DECODE_KERNELS, PREFILL_KERNELS):
        if kernel and decodes:
            block_n, warps, stages = kernel
            wanted.append((decodes[0], DecodeTuning(block_n, warps, stages, 1, 128)))
        if tuning and prefills:
            wanted.append((prefills[-1], tuning))
    compiled = []
    for batch, candidate in wanted:
        if time.monotonic() < until and _fits(_one_layer(batch, candidate)):
            compiled.append(candidate)
    return compiled


def _candidates(
    batch: Batch, kernels: Sequence[DecodeTuning | PrefillTuning], until: float
) -> Iterator[dict[str, Any]]:
    """Decode: kernels first with the standing splits, then splits with the two fastest kernels."""
    found: list[dict[str, Any]] = []
    base = decode_tuning(len(batch.runs), batch.shape.kv_heads, batch.shape.dim, 2)
    for kernel in kernels:
        if time.monotonic() > until or isinstance(kernel, DecodeTuning) != _is_decode(batch):
            continue
        if isinstance(kernel, DecodeTuning):
            kernel = replace(kernel, splits=base.splits, min_chunk=base.min_chunk)
        found += _try(batch, kernel)
    yield from found
    if not _is_decode(batch):
        return
    best = sorted(found, key=lambda line: float(line["us"]))[:2]
    for chunk, splits, line in itertools.product(MIN_CHUNKS, SPLITS, best):
        if time.monotonic() < until:
            yield from _try(batch, replace(line["candidate"], splits=splits, min_chunk=chunk))


def _is_decode(batch: Batch) -> bool:
    return batch.case.rows == len(batch.case.chunks)


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "candidate": asdict(line["candidate"])}


def _fits(one_layer: Callable[[int], None]) -> bool:
    try:
        one_layer(0)
    except Exception as error:
        if "out of resource" not in str(error):
            raise
        return False
    return True


def _try(batch: Batch, tuning: DecodeTuning | PrefillTuning) -> list[dict[str, Any]]:
    """One line, or none where the candidate is wrong."""
    device, kind = batch.q.device, "decode" if isinstance(tuning, DecodeTuning) else "prefill"
    one_layer = _one_layer(batch, tuning)
    count = min(LAYERS[kind], batch.shape.layers)

    def run() -> None:
        for layer in range(count):
            one_layer(layer)

    batch.out.fill_(torch.nan)
    one_layer(0)
    if not batch.error(0) <= TOLERANCE:
        print(f"{batch.case.name}: FAIL with {tuning}", flush=True)
        return []
    seconds = (
        statistics.median(
            measure({"run": run}, REPLAYS if device.type == "cuda" else 1, device)["run"]
        )
        / count
    )
    return [
        {
            "case": batch.case.name,
            "us": seconds * 1e6,
            "tuning": " ".join(f"{key}={value}" for key, value in asdict(tuning).items()),
            "candidate": tuning,
        }
    ]


def _one_layer(batch: Batch, tuning: DecodeTuning | PrefillTuning) -> Callable[[int], None]:
    shape, device = batch.shape, batch.q.device
    if isinstance(tuning, DecodeTuning):
        parts = len(batch.runs) * tuning.splits * shape.heads
        scratch = DecodeScratch(
            torch.empty(parts * shape.dim, device=device),
            torch.empty(parts, device=device),
            torch.zeros(len(batch.runs) * shape.kv_heads, dtype=torch.int32, device=device),
        )
        return lambda layer: _decode(batch, tuning, scratch, layer)
    tiles, number = batch.tiles(tile_rows(shape.heads, shape.kv_heads))
    return lambda layer: _prefill(batch, tuning, tiles, number, layer)


def _decode(batch: Batch, tuning: DecodeTuning, scratch: DecodeScratch, layer: int) -> None:
    decode_attention_triton(
        batch.q, batch.pages, batch.page_table, batch.rows, batch.row_seat, batch.positions, layer,
        batch.shape.kv_heads, 0, batch.out, scratch, tuning=tuning,
    )  # fmt: skip


def _prefill(
    batch: Batch, tuning: PrefillTuning, tiles: torch.Tensor, number: torch.Tensor, layer: int
) -> None:
    prefill_attention_triton(
        batch.q, batch.pages, batch.page_table, tiles, number, layer, batch.shape.kv_heads, 0,
        batch.out, tuning=tuning,
    )  # fmt: skip


#: kernels × splits that `near` tries, at this min_chunk
NEAR_KERNELS = ((32, 2, 4), (64, 2, 2), (32, 2, 6), (64, 2, 3), (64, 4, 2))
NEAR_SPLITS = (1, 2, 4, 8, 16, 32)
NEAR_CHUNK = 64


def near(cases: Sequence[Case], shape: Shape, pages: torch.Tensor) -> int:
    """Every kernel with every number of parts, decode cases alone: one line each."""
    for case in cases:
        batch = make_batch(case, shape, pages)
        print(f"{case.name}, parts at most: {', '.join(map(str, NEAR_SPLITS))}")
        standing = decode_tuning(len(batch.runs), shape.kv_heads, shape.dim, 2)
        for tuning in (
            standing,
            *(DecodeTuning(*kernel, 1, NEAR_CHUNK) for kernel in NEAR_KERNELS),
        ):
            tried = [tuning]
            if tuning is not standing:
                tried = [replace(tuning, splits=splits) for splits in NEAR_SPLITS]
            lines = [line for one in tried for line in _try(batch, one)]
            times = " ".join(f"{float(line['us']):7.2f}" for line in lines)
            print(
                f"    {tuning.block_n:3} {tuning.num_warps} {tuning.num_stages}  {times}",
                flush=True,
            )
    return 0
