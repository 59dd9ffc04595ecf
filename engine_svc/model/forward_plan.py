"""What the layers of one step read, built once a step from the plan of the core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine_svc.model.arena import Arena
from engine_svc.step_chunks import Chunk
from kernels.paged_attention import AttentionPlan, DecodeBatch, PrefillChunk
from loraplex.base_model import BaseModelSpec


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """T rows: the chunks' positions in the plan's order.

    Args:
        token_ids: [T] int64; rows of `late_rows` are filled from the seats' last tokens.
        late_rows, late_seats: [n] int64.
        positions: [T] int64.
        segments: (first_row, num_rows, slot); −1 is the base.
        first_rows: first row of each chunk.
        fresh_pages: pages whose first position this step writes.
    """

    token_ids: torch.Tensor
    late_rows: torch.Tensor
    late_seats: torch.Tensor
    positions: torch.Tensor
    attention: AttentionPlan
    segments: tuple[tuple[int, int, int], ...]
    first_rows: tuple[int, ...]
    fresh_pages: tuple[int, ...]


class ForwardPlanner:
    """Turns chunks into row indices of the arena; holds what does not change between steps."""

    def __init__(self, base: BaseModelSpec, arena: Arena) -> None:
        self._layers, self._window = base.num_layers, base.sliding_window
        self._page_size = arena.page_size
        self._device = arena.bytes.device
        self._dtype = arena.numbers.dtype
        #: [L, 2, 1] offset of (layer, k|v) inside a page, in rows of page_size positions
        self._planes = torch.arange(2 * self._layers).view(self._layers, 2, 1)

    def plan(self, chunks: Sequence[Chunk]) -> ForwardPlan:
        token_ids: list[int] = []
        positions: list[int] = []
        page_of_row: list[int] = []
        first_rows: list[int] = []
        late: list[tuple[int, int]] = []
        fresh: list[int] = []
        for chunk in chunks:
            first_rows.append(len(positions))
            if not chunk.token_ids:
                late.append((len(positions), chunk.seat))
            token_ids.extend(chunk.token_ids or (0,))
            rows = range(chunk.start, chunk.start + chunk.num_tokens)
            positions.extend(rows)
            page_of_row.extend(chunk.page_ids[position // self._page_size] for position in rows)
            fresh.extend(chunk.page_ids[-(-chunk.start // self._page_size) :])
        assert len(token_ids) == len(positions), "a chunk's token_ids and num_tokens differ"
        at = torch.tensor(positions)
        return ForwardPlan(
            token_ids=torch.tensor(token_ids).to(self._device),
            late_rows=torch.tensor([row for row, _ in late], dtype=torch.int64).to(self._device),
            late_seats=torch.tensor([seat for _, seat in late], dtype=torch.int64).to(self._device),
            positions=at.to(self._device),
            attention=self._attention(chunks, first_rows, at, torch.tensor(page_of_row)),
            segments=_segments(chunks),
            first_rows=tuple(first_rows),
            fresh_pages=tuple(fresh),
        )

    def _attention(
        self,
        chunks: Sequence[Chunk],
        first_rows: Sequence[int],
        positions: torch.Tensor,
        page_of_row: torch.Tensor,
    ) -> AttentionPlan:
        rows = self._gather_rows(page_of_row) * self._page_size + positions % self._page_size
        pairs = list(zip(chunks, first_rows, strict=True))
        decodes = [(chunk, row) for chunk, row in pairs if chunk.num_tokens == 1]
        prefills = [(chunk, row) for chunk, row in pairs if chunk.num_tokens > 1]
        return AttentionPlan(
            write=rows.to(self._device),
            decode=self._decode_batch(decodes, alone=not prefills) if decodes else None,
            prefills=tuple(self._prefill_chunk(chunk, row) for chunk, row in prefills),
        )

    def _gather_rows(self, page_ids: torch.Tensor) -> torch.Tensor:
        """[L, 2, n] flat rows of K and V of these pages, in every layer."""
        return page_ids * (2 * self._layers) + self._planes

    def _decode_batch(self, decodes: Sequence[tuple[Chunk, int]], alone: bool) -> DecodeBatch:
        longest = max(len(chunk.page_ids) for chunk, _ in decodes)
        pages = torch.tensor(
            [
                chunk.page_ids + chunk.page_ids[:1] * (longest - len(chunk.page_ids))
                for chunk, _ in decodes
            ]
        )
        starts = torch.tensor([[chunk.start] for chunk, _ in decodes])
        mask = self._mask(starts, longest)
        rows = None if alone else torch.tensor([row for _, row in decodes]).to(self._device)
        gather = self._gather_rows(pages.view(-1)).to(self._device)
        return DecodeBatch(rows, gather, mask.view(len(decodes), 1, 1, -1))

    def _prefill_chunk(self, chunk: Chunk, row: int) -> PrefillChunk:
        queries = torch.arange(chunk.start, chunk.start + chunk.num_tokens).unsqueeze(1)
        mask = self._mask(queries, len(chunk.page_ids))
        gather = self._gather_rows(torch.tensor(chunk.page_ids)).to(self._device)
        return PrefillChunk(row, chunk.num_tokens, gather, mask.view(1, 1, chunk.num_tokens, -1))

    def _mask(self, queries: torch.Tensor, num_pages: int) -> torch.Tensor:
        """[n, num_pages · page_size] for query positions [n, 1]: 0 = seen, −inf = not."""
        keys = torch.arange(num_pages * self._page_size)
        seen = keys <= queries
        if self._window:
            seen &= keys > queries - self._window
        mask = torch.zeros(seen.shape, dtype=self._dtype).masked_fill_(~seen, -torch.inf)
        return mask.to(self._device)


def sampled_segments(chunks: Sequence[Chunk]) -> tuple[tuple[int, int, int], ...]:
    """(first_row, num_rows, slot) of the rows that sample: one for each seat of a chunk."""
    return _grouped((len(chunk.sample_seats), chunk.slot) for chunk in chunks)


def _segments(chunks: Sequence[Chunk]) -> tuple[tuple[int, int, int], ...]:
    return _grouped((chunk.num_tokens, chunk.slot) for chunk in chunks)


def _grouped(counts: Iterable[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Runs of equal slots as segments, from (rows, slot) of each chunk."""
    segments: list[tuple[int, int, int]] = []
    first = 0
    for count, slot in counts:
        if segments and segments[-1][2] == slot:
            begin, rows, _ = segments.pop()
            segments.append((begin, rows + count, slot))
        elif count:
            segments.append((first, count, slot))
        first += count
    assert len({slot for _, _, slot in segments}) == len(segments), "chunks not grouped by slot"
    return tuple(segments)
