"""From chunks to hidden states: stage the inputs, then replay a captured step or launch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.model.gpu.buckets import (
    bucket_of,
    decode_buckets,
    long_buckets,
    mixed_buckets,
    padded_rows,
)
from engine_svc.model.gpu.graphs import GraphKey, StepGraphs
from engine_svc.model.gpu.page_table import PageTable
from engine_svc.model.gpu.site_deltas import captured_tile_rows
from engine_svc.model.gpu.step_inputs import StepInputs
from engine_svc.model.gpu.step_rows import StepRows, fill_rows
from engine_svc.model.gpu.step_shapes import StepLimits, trunk_step
from engine_svc.model.gpu.trunk import Trunk, TrunkStep
from engine_svc.step_chunks import Chunks
from kernels.lora_tables import PREFILL_TILE_ROWS

#: changes the embeddings of a step in place
Amend = Callable[[TrunkStep, StepRows, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step whose inputs are on their way to the device."""

    key: GraphKey
    rows: StepRows
    inputs: StepInputs


class Stepper:
    """Steps of decodes alone and steps with prompts, each with inputs of their own."""

    def __init__(
        self,
        trunk: Trunk,
        page_table: PageTable,
        limits: StepLimits,
        rank_blocks: npt.NDArray[np.int64],
        ring_depth: int,
        device: torch.device,
    ) -> None:
        """Args: rank_blocks [num_slots], of the adapter that each slot holds now."""
        self._trunk, self._page_table, self._limits = trunk, page_table, limits
        self._rank_blocks = rank_blocks
        self._decodes = StepInputs(limits.decode_sizes(), ring_depth, device)
        self._mixed = StepInputs(limits.mixed_sizes(), ring_depth, device)
        self.decode_buckets = decode_buckets(limits.max_num_seqs)
        self.mixed_buckets = mixed_buckets(self.decode_buckets, limits.max_rows)
        self.long_buckets = long_buckets(self.decode_buckets, self.mixed_buckets)
        self._graphs = StepGraphs()

    @property
    def num_bytes(self) -> int:
        return self._decodes.num_bytes + self._mixed.num_bytes + self._page_table.num_bytes

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def stage(self, chunks: Chunks, long_items: bool | None = None) -> StagedStep:
        """Send the inputs of a step; it must run before the next one is staged.

        Args: long_items, whether LoRA's work items are long, for a capture; None: as suits the
        step, if its size is captured with both or not at all.
        """
        num_rows = chunks.num_tokens
        has_prompts = num_rows > len(chunks) or num_rows > self._limits.max_num_seqs
        if has_prompts:
            inputs = self._mixed
            bucket = bucket_of(self.mixed_buckets, num_rows)
            padded = bucket or padded_rows(num_rows, self._limits.max_rows)
        else:
            inputs = self._decodes
            bucket = bucket_of(self.decode_buckets, num_rows)
            padded = bucket or num_rows
        assert num_rows <= padded, f"{num_rows} rows in a step, at most {self._limits.max_rows}"
        staged = inputs.acquire()
        usual = captured_tile_rows(padded)
        size: int | None = PREFILL_TILE_ROWS if long_items else usual
        if long_items is None and (bucket is None or (has_prompts and bucket in self.long_buckets)):
            size = None
        prefill_rows = self._limits.prefill_rows
        rows = fill_rows(chunks, staged, padded, prefill_rows, size, self._rank_blocks)
        updates = self._page_table.updates(chunks)
        room = inputs.sizes.updates
        if len(updates) > room:
            self._page_table.write(updates[room:])
            updates = updates[:room]
        staged["updates"][: len(updates)] = updates
        staged["num_updates"][0] = len(updates)
        inputs.send()
        # a step with prompts hides LoRA's empty launches: one graph serves it with and without
        with_lora = rows.num_lora_tiles > 0 or (has_prompts and bucket is not None)
        key = GraphKey(padded, has_prompts, with_lora, rows.lora_tile_rows > usual)
        return StagedStep(key, rows, inputs)

    def run(self, staged: StagedStep, amend: Amend | None = None) -> torch.Tensor:
        """Hidden states [padded rows, C] after the final norm, valid until the next run."""
        rows = staged.rows
        if amend is None and self._fits(staged) and staged.key in self._graphs:
            self._graphs.replay(staged.key)
            return self._trunk.hidden(staged.key.rows)
        step = trunk_step(
            staged.inputs, self._limits, staged.key.rows, rows, rows.num_lora_tiles > 0
        )  # fmt: skip
        if amend is None:
            return self._trunk.run(step)
        return self._trunk.run(step, lambda embedded: amend(step, rows, embedded))

    def _fits(self, staged: StagedStep) -> bool:
        """Whether a captured step of that key has room for the prompts of this one."""
        most = self._limits.captured_prefill_tiles(staged.key.rows)
        return staged.rows.num_prefill_tiles <= most

    def capture(self, chunks: Chunks) -> None:
        """Record the launches of steps like this one, with every size of work items that they
        may take."""
        key = self._capture(chunks, False)
        if key.has_prompts and key.rows in self.long_buckets:
            self._capture(chunks, True)

    def _capture(self, chunks: Chunks, long_items: bool) -> GraphKey:
        staged = self.stage(chunks, long_items)
        key = staged.key
        tile_rows = PREFILL_TILE_ROWS if long_items else captured_tile_rows(key.rows)
        step = trunk_step(staged.inputs, self._limits, key.rows, None, key.with_lora, tile_rows)
        self._trunk.run(step)
        self._graphs.capture(key, lambda: self._trunk.run(step))
        return key
