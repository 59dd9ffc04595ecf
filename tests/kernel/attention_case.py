"""Random sequences in scattered pages for attention tests.

Positions that no sequence has written are NaN, rows that no launch may write are a canary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.prefill_attention import plan_tiles

CANARY = -1234.5
NUM_LAYERS, LAYER = 3, 1
#: ‖out − expected‖ / ‖expected‖: the kernels round softmax's weights to the compute dtype
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@dataclass(frozen=True)
class AttentionCase:
    """Args: rows of sequence i are first_rows[i] …; lengths count its positions, those included."""

    q: torch.Tensor
    pages: torch.Tensor
    page_table: torch.Tensor
    decode_rows: torch.Tensor
    row_seat: torch.Tensor
    positions: torch.Tensor
    tiles: torch.Tensor
    num_tiles: torch.Tensor
    num_kv_heads: int
    expected: torch.Tensor
    live_rows: torch.Tensor

    def empty_out(self) -> torch.Tensor:
        rows, heads, dim = self.q.shape
        return torch.full((rows, heads * dim), CANARY, dtype=self.q.dtype, device=self.q.device)

    def check(self, out: torch.Tensor) -> None:
        """`out` holds the live rows and nothing else was written."""
        out = out.cpu()
        assert (out[~self.live_rows] == CANARY).all()
        actual, expected = out[self.live_rows].double(), self.expected[self.live_rows]
        assert actual.isfinite().all()
        error, limit = actual - expected, TOLERANCE[self.q.dtype]
        if expected.numel():
            assert error.norm() <= limit * expected.norm(), float(error.norm() / expected.norm())
            assert error.abs().max() <= 10 * limit * expected.abs().max()


def attention_case(
    chunks: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    page_size: int = 16,
    window: int = 0,
    padding: int = 2,
    rows_a_tile: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> AttentionCase:
    """One sequence for each (start, num_rows) chunk: positions before start are there already.

    Args:
        heads: (H, Hk, D).
        padding: rows of no sequence, in front and among the decode rows.
        rows_a_tile: makes prefill tiles; None makes decode rows, and every chunk has one row.
    """
    random = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads, dim = heads
    num_rows = padding + sum(rows for _, rows in chunks)
    needed = [-(-(start + rows) // page_size) for start, rows in chunks]
    max_pages, num_pages = max([1, *needed]) + 1, sum(needed) + 2
    q = torch.randn((num_rows, num_heads, dim), generator=random).to(dtype)
    shape = (num_pages, NUM_LAYERS, 2, page_size, num_kv_heads, dim)
    pages = torch.full(shape, torch.nan, dtype=dtype)
    free = torch.randperm(num_pages, generator=random).tolist()
    seats = torch.randperm(len(chunks) + 3, generator=random).tolist()
    page_table = torch.full((len(chunks) + 3, max_pages), -1, dtype=torch.int32)
    row_seat = torch.full((num_rows,), -1, dtype=torch.int32)
    positions = torch.zeros(num_rows, dtype=torch.int32)
    expected = torch.zeros((num_rows, num_heads * dim), dtype=torch.float64)
    first, decode_rows, runs = padding, [-1] * padding, []
    for (start, rows), count, seat in zip(chunks, needed, seats, strict=False):
        length = start + rows
        k, v = (torch.randn((length, num_kv_heads, dim), generator=random).to(dtype) for _ in "kv")
        own = [free.pop() for _ in range(count)]
        page_table[seat, :count] = torch.tensor(own, dtype=torch.int32)
        where = torch.arange(length)
        page = torch.tensor(own)[where // page_size]
        pages[page, LAYER, 0, where % page_size] = k
        pages[page, LAYER, 1, where % page_size] = v
        span = slice(first, first + rows)
        row_seat[span] = seat
        positions[span] = torch.arange(start, length, dtype=torch.int32)
        expected[span] = dense_attention(q[span], k, v, window)
        decode_rows.append(first)
        runs.append((first, rows, seat, start))
        first += rows
    order = torch.randperm(len(decode_rows), generator=random)
    tiles = plan_tiles(runs, rows_a_tile) if rows_a_tile else []
    # two more tiles than are work, and they hold nonsense
    tile_tensor = torch.full((len(tiles) + 2, 4), 1_000_000, dtype=torch.int32)
    tile_tensor[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
    return AttentionCase(
        q.to(device),
        pages.to(device),
        page_table.to(device),
        torch.tensor(decode_rows, dtype=torch.int32)[order].to(device),
        row_seat.to(device),
        positions.to(device),
        tile_tensor.to(device),
        torch.tensor([len(tiles)], dtype=torch.int32).to(device),
        num_kv_heads,
        expected,
        torch.arange(num_rows) >= padding,
    )


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """The last q rows of a sequence over all of its keys and values, head by head, in fp64."""
    rows, heads, dim = q.shape
    length, kv_heads, _ = k.shape
    own = torch.arange(length - rows, length)[:, None]
    position = torch.arange(length)[None, :]
    hidden = position > own
    if window:
        hidden = hidden | (position <= own - window)
    out = torch.empty((rows, heads, dim), dtype=torch.float64)
    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = q[:, head].double() @ k[:, group].double().T / dim**0.5
        out[:, head] = scores.masked_fill(hidden, -torch.inf).softmax(1) @ v[:, group].double()
    return out.reshape(rows, heads * dim)
