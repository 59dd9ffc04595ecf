"""What `bench-attention` measures: sequences in scattered pages, and what they must cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention_reference import attend
from kernels.prefill_attention import plan_tiles

PAGE_SIZE = 16
#: ‖out − reference‖ / ‖reference‖ in bf16: softmax's weights and the result are rounded to it
TOLERANCE = 6e-3
#: rows of a case that are compared with the reference
CHECKED_ROWS = 48


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    layers: int

    @property
    def position_bytes(self) -> int:
        """K and V of one position in one layer, bf16."""
        return 4 * self.kv_heads * self.dim


SHAPE_8B = Shape(32, 8, 128, 32)


@dataclass(frozen=True, slots=True)
class Case:
    """(start, new positions) of each sequence; one new position each makes a decode case."""

    name: str
    chunks: tuple[tuple[int, int], ...]

    @property
    def positions(self) -> int:
        return sum(start + new for start, new in self.chunks)

    @property
    def rows(self) -> int:
        return sum(new for _, new in self.chunks)

    def kv_bytes(self, shape: Shape) -> int:
        """Of one layer: what is read at least once."""
        return self.positions * shape.position_bytes

    def operations(self, shape: Shape) -> int:
        """Of one layer: two products of D for each (row, head, position seen)."""
        seen = sum(new * start + new * (new + 1) // 2 for start, new in self.chunks)
        return 4 * seen * shape.heads * shape.dim


def decode_case(rows: int, context: int) -> Case:
    return Case(f"decode, {rows} × {context}", ((context - 1, 1),) * rows)


def ragged_case(rows: int, shortest: int, longest: int) -> Case:
    """Contexts from `shortest` to `longest`, evenly, in a mixed order."""
    lengths = [shortest + (longest - shortest) * i // (rows - 1) for i in range(rows)]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()
    chunks = tuple((lengths[i] - 1, 1) for i in order)
    return Case(f"decode, {rows} × {shortest}…{longest}", chunks)


def prefill_case(sequences: int, start: int, new: int) -> Case:
    name = f"prefill, {sequences} × {new}" + (f" after {start}" if start else "")
    return Case(name, ((start, new),) * sequences)


@dataclass(frozen=True)
class Batch:
    """A case on the device. `pages` belongs to all cases."""

    case: Case
    shape: Shape
    pages: torch.Tensor
    q: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    row_seat: torch.Tensor
    positions: torch.Tensor
    runs: tuple[tuple[int, int, int, int], ...]
    out: torch.Tensor

    def tiles(self, rows_a_tile: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tiles, their number) of prefill_attention."""
        tiles = torch.tensor(plan_tiles(self.runs, rows_a_tile), dtype=torch.int32)
        count = torch.tensor([tiles.shape[0]], dtype=torch.int32)
        return tiles.to(self.q.device), count.to(self.q.device)

    def error(self, layer: int) -> float:
        """‖out − reference‖ / ‖reference‖ over rows of the first and last sequences; the reference
        computes in fp32."""
        wrong = right = 0.0
        for first, new, seat, start in {
            self.runs[0],
            self.runs[len(self.runs) // 2],
            self.runs[-1],
        }:
            count = min(new, CHECKED_ROWS)
            for skipped in {0, new - count}:
                span = slice(first + skipped, first + skipped + count)
                table = self.page_table[seat]
                part = self.q[span].float()
                expected = attend(part, self.pages, table, start + skipped, layer, 0)
                wrong += float((self.out[span].float() - expected).square().sum())
                right += float(expected.square().sum())
        return float((wrong / right) ** 0.5)


def make_pages(shape: Shape, positions: int, device: torch.device) -> torch.Tensor:
    """Pages for `positions` and half of a page each for up to 256 sequences, random numbers."""
    count = positions // PAGE_SIZE + 256
    size = (count, shape.layers, 2, PAGE_SIZE, shape.kv_heads, shape.dim)
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_()


def make_batch(case: Case, shape: Shape, pages: torch.Tensor) -> Batch:
    device = pages.device
    needed = [-(-(start + new) // PAGE_SIZE) for start, new in case.chunks]
    free = torch.randperm(pages.shape[0], generator=torch.Generator().manual_seed(1)).int()
    page_table = torch.zeros((len(needed), max(needed)), dtype=torch.int32)
    row_seat: list[int] = []
    positions: list[int] = []
    runs = []
    taken = first = 0
    for seat, ((start, new), count) in enumerate(zip(case.chunks, needed, strict=True)):
        page_table[seat, :count] = free[taken : taken + count]
        row_seat += [seat] * new
        positions += range(start, start + new)
        runs.append((first, new, seat, start))
        taken, first = taken + count, first + new
    assert taken <= pages.shape[0], (taken, pages.shape[0])
    q = torch.empty((first, shape.heads, shape.dim), dtype=torch.bfloat16, device=device).normal_()
    return Batch(
        case,
        shape,
        pages,
        q,
        page_table.to(device),
        torch.arange(first, dtype=torch.int32, device=device),
        torch.tensor(row_seat, dtype=torch.int32, device=device),
        torch.tensor(positions, dtype=torch.int32, device=device),
        tuple(runs),
        torch.full(
            (first, shape.heads * shape.dim), torch.nan, dtype=torch.bfloat16, device=device
        ),
    )
