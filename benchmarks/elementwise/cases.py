"""The cases of `bench-elementwise`: random inputs in the shapes of an 8B model, and launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from kernels import add_rms_norm_triton as norm
from kernels import rope_store_triton as rope
from kernels import silu_mul_delta_triton as silu
from kernels.lora_tables import LoraDelta, SiteTable

PAGE_SIZE, CONTEXT = 16, 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model, and the numbers of rows to measure."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    layers: int
    few: tuple[int, ...]
    many: tuple[int, ...]
    dtype: torch.dtype


LLAMA = Shape(4096, 14336, 32, 8, 128, 128256, 8, (1, 8, 64, 256), (2048, 8192), torch.bfloat16)
#: for a dry run
TINY = Shape(64, 96, 4, 2, 16, 2100, 2, (2,), (20,), torch.float32)


@dataclass(frozen=True, slots=True)
class Case:
    """`tuning`: module constants that differ while it is launched, by (module, name)."""

    title: str
    num_bytes: float
    launch: Callable[[], object]
    tuning: Mapping[tuple[ModuleType, str], int] = field(default_factory=dict)

    @contextmanager
    def tuned(self) -> Iterator[None]:
        before = {at: getattr(*at) for at in self.tuning}
        try:
            for (module, name), value in self.tuning.items():
                setattr(module, name, value)
            yield
        finally:
            for (module, name), value in before.items():
                setattr(module, name, value)


class Inputs:
    """Of one number of rows."""

    def __init__(self, shape: Shape, rows: int, device: str) -> None:
        self.shape, self.rows, self.device = shape, rows, device
        self.x, self.residual, self.out = (self._normal(rows, shape.hidden) for _ in range(3))
        self.weight = self._normal(shape.hidden)
        self.gate_up, self.inner = (self._normal(rows, n * shape.inner) for n in (2, 1))
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        self.qkv = self._normal(rows, width)
        self.q = self._normal(rows, shape.heads, shape.dim)
        self.norms = [self._normal(shape.dim) for _ in range(2)]
        seats = min(rows, 256)
        per_seat = -(-rows // seats)
        index = torch.arange(rows, device=device, dtype=torch.int32)
        self.row_seat, self.positions = index // per_seat, index % per_seat
        pages = -(-per_seat // PAGE_SIZE)
        table = torch.randperm(seats * pages, device=device).int().view(seats, pages)
        self.page_table = table
        kv = (seats * pages, shape.layers, 2, PAGE_SIZE, shape.kv_heads, shape.dim)
        self.pages = torch.zeros(kv, dtype=shape.dtype, device=device)
        angles = torch.rand(CONTEXT * 8, 1, shape.dim // 2, device=device)
        self.cos, self.sin = angles.cos().to(shape.dtype), angles.sin().to(shape.dtype)
        self.deltas = {n: self._delta(n) for n in (shape.hidden, 2 * shape.inner, width)}

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device).to(self.shape.dtype)

    def _delta(self, width: int) -> LoraDelta:
        """All rows of eight adapters, plain LoRA."""
        slots, device = 8, self.device
        none = torch.full((slots, 1), -1, dtype=torch.int64, device=device)
        zeros = torch.zeros((slots, 1), dtype=torch.int32, device=device)
        table = SiteTable(
            torch.zeros(16, dtype=torch.uint8, device=device), none.view(slots, 1, 1),
            none.view(slots, 1, 1), zeros, zeros.float(), none, none,
            torch.ones((slots, 1), dtype=torch.uint8, device=device),
        )  # fmt: skip
        row_slot = torch.arange(self.rows, device=device, dtype=torch.int32) % slots
        return LoraDelta(self._normal(self.rows, width), row_slot, table, 0)

    def kernels(self, with_delta: bool, **options: Any) -> Iterator[tuple[str, float, Any]]:
        """(name, bytes, launch) of the three consumers."""
        s = self.shape
        item = self.rows * s.dtype.itemsize
        width = self.qkv.shape[1]
        adds = {n: delta if with_delta else None for n, delta in self.deltas.items()}
        extra = int(with_delta)
        yield (
            "add_rms_norm",
            item * s.hidden * (4 + extra),
            lambda: norm.add_rms_norm_triton(
                self.x, self.residual, self.weight, 1e-5, self.out, adds[s.hidden], **options
            ),
        )
        yield (
            "silu_mul",
            item * s.inner * (3 + 2 * extra),
            lambda: silu.silu_mul_delta_triton(
                self.gate_up, self.inner, adds[2 * s.inner], **options
            ),
        )
        yield (
            "rope_store",
            item * width * (2 + extra),
            lambda: rope.rope_store_triton(
                self.qkv, self.positions, self.row_seat, self.page_table, self.pages, 1, self.cos,
                self.sin, self.q, None, None, 1e-5, True, adds[width], **options,
            ),
        )  # fmt: skip


def consumers(shape: Shape, device: str) -> Iterator[Case]:
    for rows in (*shape.few, *shape.many):
        inputs = Inputs(shape, rows, device)
        for with_delta in (False, True):
            for pdl in (False, True) if device == "cuda" and rows in shape.few else (False,):
                options = {"pdl": True} if pdl else {}
                for name, size, launch in inputs.kernels(with_delta, **options):
                    parts = [name, f"{rows} rows"] + ["delta"] * with_delta + ["pdl"] * pdl
                    yield Case(", ".join(parts), size, launch)


#: what a program holds, by kernel and regime: (module, constant) → values beside the one in use
FEW_TUNING: dict[str, tuple[tuple[ModuleType, str], tuple[int, ...]]] = {
    "add_rms_norm": ((norm, "FEW"), (4, 16)),
    "silu_mul": ((silu, "FEW_BLOCK"), (256, 1024)),
    "rope_store": ((rope, "FEW_HEADS"), (2, 8)),
}
MANY_TUNING: dict[str, tuple[tuple[ModuleType, str], tuple[int, ...]]] = {
    "add_rms_norm": ((norm, "MANY"), (8, 32)),
    "silu_mul": ((silu, "MANY_BLOCK"), (1024, 4096)),
    "rope_store": ((rope, "MANY_HEADS"), (4, 16)),
}


def sweep(shape: Shape, device: str) -> Iterator[Case]:
    for rows, tuning in (
        *((rows, FEW_TUNING) for rows in (shape.few[0], shape.few[-1])),
        (shape.many[-1], MANY_TUNING),
    ):
        inputs = Inputs(shape, rows, device)
        for name, size, launch in inputs.kernels(True):
            at, values = tuning[name]
            for value in values:
                title = f"{name}, {rows} rows, delta, {at[1]} {value}"
                yield Case(title, size, launch, {at: value})
