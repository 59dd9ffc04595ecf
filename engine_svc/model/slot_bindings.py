"""Bindings of slots, in plan order: the site table's row and what the vocabulary keeps of it."""

from __future__ import annotations

from collections.abc import Iterable

from engine_svc.model.lora import StepLora
from engine_svc.model.site_table import SiteTableRows, SlotRow
from engine_svc.model.slot_writer import ArenaSlotWriter
from engine_svc.model.vocabulary import AdapterVocabulary
from engine_svc.types import NO_SLOT, SlotBinding


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

    def check_bound(self, slots: Iterable[int]) -> None:
        """Raises: AssertionError naming a slot without an adapter, NO_SLOT apart."""
        for slot in slots:
            bound = slot == NO_SLOT or self._site_table.digest(slot)
            assert bound, f"slot {slot} holds no adapter: the base must not answer for it"

    def bind(self, binding: SlotBinding) -> None:
        """The slot holds this adapter for the steps from here on."""
        self.apply(binding.slot, self._slot_writer.take_row(binding.slot, binding.digest))

    def apply(self, slot: int, row: SlotRow | None) -> None:
        """The slot holds what this row says, or nothing."""
        if row is None:
            self._site_table.clear(slot)
        else:
            self._site_table.write(slot, row)
        self._lora.bind(slot, row)
        self._vocabulary.bind(slot, row)
