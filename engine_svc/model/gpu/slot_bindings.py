"""Bindings of slots, in plan order: the site table's row and what the vocabulary keeps of it."""

from __future__ import annotations

from engine_svc.model.lora import StepLora
from engine_svc.model.site_table import SiteTableRows, SlotRow
from engine_svc.model.slot_writer import ArenaSlotWriter
from engine_svc.model.vocabulary import AdapterVocabulary
from engine_svc.types import BASE_DIGEST, SlotBinding


class SlotBindings:
    """Applies a plan's bindings on the current stream."""

    def __init__(
        self,
        site_table: SiteTableRows,
        lora: StepLora,
        vocabulary: AdapterVocabulary,
        slot_writer: ArenaSlotWriter,
    ) -> None:
        self._site_table, self._lora = site_table, lora
        self._vocabulary, self._slot_writer = vocabulary, slot_writer

    def is_bound(self, slot: int) -> bool:
        return bool(self._site_table.digest(slot))

    def bind(self, binding: SlotBinding) -> None:
        """The slot holds this adapter for the steps from here on, or none."""
        slot = binding.slot
        is_base = binding.digest == BASE_DIGEST
        self.apply(slot, None if is_base else self._slot_writer.take_row(slot, binding.digest))

    def apply(self, slot: int, row: SlotRow | None) -> None:
        """The slot holds what this row says."""
        if row is None:
            self._site_table.clear(slot)
        else:
            self._site_table.write(slot, row)
        self._lora.bind(slot, row)
        self._vocabulary.bind(slot, row)
