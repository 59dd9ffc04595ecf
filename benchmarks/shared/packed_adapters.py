"""Random adapters of given ranks, packed as the engine packs them, in a host region of their own.

An adapter's numbers are a window of one random block that repeats itself, each at another place:
distinct contents without drawing 42 million numbers for each.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.shared.made_adapters import write_adapter
from benchmarks.shared.random_files import RandomNumbers, Span
from engine_svc.adapters.packer import plan_packing
from engine_svc.layout import AdapterLayout
from engine_svc.packed import PackedHeader, decode_header, encode_header
from engine_svc.types import AdapterRef, HostSpan, WeightsFailed, WeightsReady
from loraplex.adapter_format import CONFIG_FILE, WEIGHTS_FILE, BaseModelFacts, adapter_parts
from loraplex.adapter_format.options import parse_adapter_config
from loraplex.base_model import BaseModelSpec

_ALIGN = 4096
#: numbers between the windows of two adapters
_SHIFT_NUMBERS = 4096 + 8
#: what an adapter of rank 16 changes of a projection's output, in deviations of that output
_EFFECT = 0.3


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """One adapter in the region."""

    ref: AdapterRef
    span: HostSpan
    num_pages: int
    used_bytes: int


class MemoryFile:
    """A file in memory, as the engine's host region is one: a GPU can page-lock it."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("bench-region")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def close(self) -> None:
        """The memory goes with its last mapping."""
        os.close(self._descriptor)


class AdapterRegion:
    """Writes adapters to `path` as the loader would; implements the core's WeightsSource.

    All are written before the first is loaded: the slot writer maps the file once.
    """

    def __init__(self, path: Path, base: BaseModelSpec, layout: AdapterLayout) -> None:
        self._path, self._layout = path, layout
        self._facts = BaseModelFacts("shape", (), base, eos_token_ids=base.eos_token_ids)
        self._answers: list[WeightsReady | WeightsFailed] = []
        self._by_digest: dict[str, PackedAdapter] = {}
        self._end = _ALIGN
        # s·B·A·x has deviation 2 · d² · √(16 · hidden_size) for numbers of deviation d
        deviation = (_EFFECT / (8 * base.hidden_size**0.5)) ** 0.5
        self._numbers = RandomNumbers.normal(layout.dtype, deviation)
        path.write_bytes(bytes(_ALIGN))

    def write(self, ranks: Sequence[int]) -> tuple[PackedAdapter, ...]:
        """One adapter for each of `ranks`, all linears, alpha = 2 · rank."""
        templates = {rank: self._template(rank) for rank in set(ranks)}
        written, spans = [], []
        for rank in ranks:
            index, template = len(self._by_digest), templates[rank]
            digest = "sha256:" + hashlib.sha256(f"{index} {rank}".encode()).hexdigest()
            header = encode_header(
                digest, self._layout.digest, template.num_pages, template.used_bytes,
                template.arrays,
            )  # fmt: skip
            images = template.num_pages * self._layout.page_bytes
            span = HostSpan(self._end, len(header) + images)
            with self._path.open("r+b") as file:
                file.seek(span.offset)
                file.write(header)
            spans.append(Span(span.offset + len(header), images, index * _SHIFT_NUMBERS))
            self._end += -(-span.num_bytes // _ALIGN) * _ALIGN
            ref = AdapterRef(f"adapter-{index:04d}", 1, digest, public=True, max_rank=rank)
            adapter = PackedAdapter(ref, span, template.num_pages, template.used_bytes)
            self._by_digest[digest] = adapter
            written.append(adapter)
        self._numbers.write(self._path, spans)
        return tuple(written)

    # ---- WeightsSource: all that was written is ready at once

    def want(self, ref: AdapterRef, rank: int) -> None:
        one = self._by_digest[ref.digest]
        ready = WeightsReady(ref.digest, one.span, one.num_pages, one.used_bytes, "host", 0.0)
        self._answers.append(ready)

    def drop(self, digest: str) -> None:
        """The bytes stay."""

    def poll(self) -> tuple[WeightsReady | WeightsFailed, ...]:
        answers = tuple(self._answers)
        self._answers.clear()
        return answers

    # ----

    def _template(self, rank: int) -> PackedHeader:
        """Where everything lies in an adapter of that rank; its files have no content."""
        with tempfile.TemporaryDirectory(prefix="lpx-bench-") as scratch:
            folder = write_adapter(Path(scratch), rank, self._facts, seed=None)
            options = parse_adapter_config((folder / CONFIG_FILE).read_bytes())[0]
            parts = adapter_parts(options, folder / WEIGHTS_FILE, self._facts)
            plan = plan_packing(parts, self._layout, "sha256:" + "0" * 64)
        return decode_header(memoryview(plan.header), self._layout.digest)
