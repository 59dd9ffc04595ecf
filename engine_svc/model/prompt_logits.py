"""Log probabilities of prompt tokens, for the requests that ask: in blocks that bound the logits'
memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.model.logprobs import RankedTokens, rank_tokens
from engine_svc.model.lora import Segment
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    PromptLogprobs,
)

#: rows of logits of an adapter's own head, or of prompts, that exist at one time
BLOCK_ROWS = 32
#: (hidden [n, C], segments by slot) → logits [n, V]
LogitsOf = Callable[[torch.Tensor, Sequence[Segment]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """Positions first_position … of one seat's sequence; `ranked` may still be on its way."""

    seat: int
    first_position: int
    top: int
    targets: list[int]
    ranked: RankedTokens

    def collect(self) -> PromptLogprobs:
        """Waits for the device."""
        tokens = self.ranked.rows(self.targets, [self.top] * len(self.targets))
        return PromptLogprobs(self.seat, self.first_position, tuple(tokens))


def prompt_blocks(
    chunks: Chunks,
    first_rows: Sequence[int] | npt.NDArray[np.int64],
    hidden: torch.Tensor,
    logits_of: LogitsOf,
) -> list[PromptBlock]:
    """What prompt_logprobs asked for. Args: first_rows, of each chunk in hidden [T, C]."""
    blocks: list[PromptBlock] = []
    for row, chunk in chunks.prompts.items():
        if chunk.prompt_logprobs is not None:
            at = hidden[int(first_rows[row]) :]
            blocks.extend(_of_chunk(chunk, at, chunk.prompt_logprobs, logits_of))
    return blocks


def _of_chunk(
    chunk: Chunk, hidden: torch.Tensor, top: int, logits_of: LogitsOf
) -> list[PromptBlock]:
    following = [*chunk.token_ids[1:], chunk.next_prompt_token]
    targets = following if chunk.next_prompt_token >= 0 else following[:-1]
    blocks = []
    for start in range(0, len(targets), BLOCK_ROWS):
        block = targets[start : start + BLOCK_ROWS]
        rows = hidden[start : start + len(block)]
        logits = logits_of(rows, ((0, len(block), chunk.slot),)).float()
        ranked = rank_tokens(logits, torch.tensor(block, device=hidden.device), top)
        blocks.append(PromptBlock(chunk.seat, chunk.start + start + 1, top, block, ranked))
    return blocks
