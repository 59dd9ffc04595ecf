"""Logits as an engine computes them, of one adapter or the base, without a scheduler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engine_svc.adapters.folder_weights import FolderWeights, bytes_for_folders
from engine_svc.adapters.host_region import HostRegion
from engine_svc.compose import load_engine_model
from engine_svc.settings import EngineSettings, step_tokens
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    NO_SLOT,
    AdapterRef,
    SlotBinding,
    SlotLoad,
    StepPlan,
    WeightsReady,
)
from loraplex.adapter_format import BaseModelFacts
from loraplex.status import FailedPrecondition, ResourceExhausted

_LOAD_WAIT_S = 600.0


class ServedLogits:
    """The engine's own model, packer and slot writer; one adapter in slot 0.

    Raises: LoraplexError: what an engine would refuse.
    """

    def __init__(
        self,
        settings: EngineSettings,
        facts: BaseModelFacts,
        adapter: Path,
        scratch: Path,
        *,
        base_model_confirmed: bool,
    ) -> None:
        num_bytes = bytes_for_folders(settings.host_cache_bytes, [adapter])
        region = HostRegion.create(scratch / "host_region", num_bytes)
        self._model = load_engine_model(settings, region.path)
        self._chunk = step_tokens(settings, self._model.device)
        weights = FolderWeights(facts, self._model.layout, region)
        self.ref: AdapterRef = weights.add(
            adapter.resolve().name, adapter, max_rank=settings.max_lora_rank,
            base_model_confirmed=base_model_confirmed, max_saved_bytes=1 << 62,
        )  # fmt: skip
        self._free = list(range(self._model.num_pages))
        self._step = 0
        self._bindings: tuple[SlotBinding, ...] = (self._load(weights),)

    @property
    def dtype(self) -> str:
        return self._model.dtype

    def of_adapter(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] fp32."""
        return self._run(token_ids, 0)

    def of_base(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V] fp32."""
        return self._run(token_ids, NO_SLOT)

    def close(self) -> None:
        self._model.slot_writer.close()

    def _load(self, weights: FolderWeights) -> SlotBinding:
        weights.want(self.ref, 0)
        ready = weights.poll()[0]
        assert isinstance(ready, WeightsReady), "it was added above"
        pages = self._take(ready.num_pages)
        writer = self._model.slot_writer
        writer.start(SlotLoad(0, self.ref.digest, ready.span, pages))
        give_up_s = time.monotonic() + _LOAD_WAIT_S
        while not (ended := writer.poll()):
            if time.monotonic() > give_up_s:
                raise ResourceExhausted(f"the adapter was not loaded in {_LOAD_WAIT_S:g} s")
            time.sleep(0.001)
        if (failure := ended[0][1]) is not None:
            raise FailedPrecondition(failure.message, reason=failure.reason)
        return SlotBinding(0, self.ref.digest, pages)

    def _run(self, token_ids: Sequence[int], slot: int) -> torch.Tensor:
        size = self._model.page_size
        pages = self._take(-(-len(token_ids) // size))
        parts = []
        for start in range(0, len(token_ids), self._chunk):
            part = tuple(token_ids[start : start + self._chunk])
            seen = pages[: -(-(start + len(part)) // size)]
            chunk = Chunk(0, slot, start, len(part), part, seen)
            self._step += 1
            plan = StepPlan(self._step, Chunks.of((chunk,)), slot_bindings=self._bindings)
            self._bindings = ()
            parts.append(self._model.runner.all_logits(plan).cpu())
        self._free.extend(pages)
        return torch.cat(parts)

    def _take(self, count: int) -> tuple[int, ...]:
        if count > len(self._free):
            raise ResourceExhausted(
                f"{count} pages are needed, {len(self._free)} are free; raise --arena-bytes",
                reason="SIZE_LIMIT",
            )
        return tuple(self._free.pop() for _ in range(count))
