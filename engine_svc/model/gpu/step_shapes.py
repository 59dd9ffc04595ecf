"""The capacities of a step's inputs, and views of them for one padded number of rows. A view's
shape decides a launch's grid, so a captured step and its later replays share them."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.model.gpu.site_deltas import StepAdapters, most_lora_tiles
from engine_svc.model.gpu.step_inputs import InputSizes, StepInputs
from engine_svc.model.gpu.step_rows import StepRows
from engine_svc.model.gpu.trunk import TrunkStep
from kernels.lora_tables import TILE_ROWS, SegmentPlan

#: prompts in a captured step: a program without a tile takes its turn on the GPU all the same, two
#: at a time on a multiprocessor
CAPTURED_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds a step. `rank_blocks`: of an adapter at most; `prefill_rows`: of a prefill tile
    at most."""

    max_rows: int
    max_num_seqs: int
    num_slots: int
    rank_blocks: int
    prefill_rows: int

    def captured_lora_tiles(self, rows: int, tile_rows: int) -> int:
        """Of a captured step, of any adapters."""
        return rows // tile_rows + min(rows, self.num_slots)

    def prefill_tiles(self, rows: int) -> int:
        return rows // self.prefill_rows + min(rows // 2, self.max_num_seqs)

    def captured_prefill_tiles(self, rows: int) -> int:
        """Of a captured step; one with more prompts than that is launched."""
        return rows // self.prefill_rows + min(rows // 2, self.max_num_seqs, CAPTURED_PROMPTS)

    def decode_sizes(self) -> InputSizes:
        """Of steps without prompts: usually at most one new page a row."""
        rows = self.max_num_seqs
        lora_tiles = most_lora_tiles(rows, self.num_slots)
        return InputSizes(rows, rows, lora_tiles, self.rank_blocks, 0, 2 * rows)

    def mixed_sizes(self) -> InputSizes:
        rows, seqs = self.max_rows, self.max_num_seqs
        lora_tiles = most_lora_tiles(rows, self.num_slots)
        return InputSizes(
            rows, seqs, lora_tiles, self.rank_blocks, self.prefill_tiles(rows), rows + seqs
        )


def trunk_step(
    inputs: StepInputs,
    limits: StepLimits,
    padded: int,
    rows: StepRows | None,
    with_lora: bool,
    tile_rows: int = TILE_ROWS,
) -> TrunkStep:
    """Args: rows, of the step that runs; None: of any step with so many padded rows and LoRA work
    items of `tile_rows`, as a capture needs it."""
    device = inputs.on_device
    has_prefills = inputs.sizes.prefill_tiles > 0
    if rows is None:
        num_prefills = limits.captured_prefill_tiles(padded)
        num_decodes = min(padded, inputs.sizes.decodes)
    else:
        num_prefills = rows.num_prefill_tiles
        # none: not launched; else as many as ever, since each number may be another kernel
        num_decodes = min(padded, inputs.sizes.decodes) if rows.num_decodes else 0
    adapters = None
    if with_lora:
        segments = () if rows is None else tuple(s for s in rows.segments if s[2] >= 0)
        if rows is None:
            num_tiles = limits.captured_lora_tiles(padded, tile_rows)
        else:
            num_tiles, tile_rows = rows.num_lora_tiles, rows.lora_tile_rows
        shrink_tiles = device["shrink_tiles"][: num_tiles * limits.rank_blocks]
        plan = SegmentPlan(
            segments,
            device["tiles"][:num_tiles],
            device["num_tiles"],
            shrink_tiles,
            device["num_shrink_tiles"],
            tile_rows,
        )
        adapters = StepAdapters(plan, device["row_slot"][:padded])
    return TrunkStep(
        token_ids=device["token_ids"][:padded],
        positions=device["positions"][:padded],
        row_seat=device["row_seat"][:padded],
        decode_rows=device["decode_rows"][:num_decodes],
        prefill_tiles=device["prefill_tiles"][:num_prefills] if has_prefills else None,
        num_prefill_tiles=device["num_prefill_tiles"],
        updates=device["updates"],
        num_updates=device["num_updates"],
        adapters=adapters,
    )
