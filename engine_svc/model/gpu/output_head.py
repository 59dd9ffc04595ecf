"""From hidden states to the logits of the rows that sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_svc.model.gpu.buckets import bucket_of
from engine_svc.model.gpu.step_rows import StepRows
from engine_svc.model.gpu.stepper import StagedStep
from engine_svc.model.gpu.trunk import Projection
from engine_svc.model.linear import Linear
from engine_svc.model.lora import Segment
from engine_svc.model.prompt_logits import BLOCK_ROWS
from engine_svc.model.vocabulary import AdapterVocabulary


class OutputHead:
    """The base's head into a static buffer; heads of adapters as model/vocabulary.py has them."""

    def __init__(
        self,
        head: Linear,
        vocabulary: AdapterVocabulary,
        buckets: Sequence[int],
        like: torch.Tensor,
    ) -> None:
        """Args: buckets, numbers of rows that are computed, the last one most rows; like, any
        tensor of the compute dtype on the device."""
        self._linear, self._head = head, Projection(head)
        self._vocabulary, self._buckets = vocabulary, buckets
        most = buckets[-1]
        self._hidden = like.new_zeros((most, head.in_features))
        self._logits = like.new_zeros((most, head.out_features))

    @property
    def num_bytes(self) -> int:
        return self._hidden.nbytes + self._logits.nbytes

    def logits(self, staged: StagedStep, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] compute dtype of the step's n sampled rows, valid until the next step; hidden
        [padded rows, C], of the same buckets where every row samples."""
        rows = staged.rows
        count = len(rows.sample_rows)
        padded = bucket_of(self._buckets, count)
        assert padded is not None, f"{count} samples in a step, at most {self._buckets[-1]}"
        if not rows.samples_all:
            sampled = staged.inputs.on_device["sample_rows"][:padded]
            hidden = torch.index_select(hidden, 0, sampled, out=self._hidden[:padded])
        out = self._logits[:padded]
        self._head(hidden[:padded], out)
        return out[:count]

    def adapted_logits(self, rows: StepRows, hidden: torch.Tensor) -> torch.Tensor:
        """The same where adapters of the step bring a head: a new tensor."""
        at = torch.from_numpy(rows.sample_rows).to(hidden.device)
        return self.of_segments(hidden.index_select(0, at), rows.sample_segments)

    def of_segments(self, hidden: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """[n, C] → [n, V], segments by slot: a new tensor, by any adapter's head."""
        parts = []
        for first in range(0, hidden.shape[0], BLOCK_ROWS):
            block = hidden[first : first + BLOCK_ROWS]
            inside = _within(segments, first, first + len(block))
            parts.append(self._vocabulary.logits(self._linear, block, inside))
        return torch.cat(parts)


def _within(segments: Sequence[Segment], first: int, end: int) -> list[Segment]:
    """The parts of segments in rows first … end − 1, counted from first."""
    found = []
    for begin, count, slot in segments:
        low, high = max(begin, first), min(begin + count, end)
        if low < high:
            found.append((low - first, high - low, slot))
    return found
