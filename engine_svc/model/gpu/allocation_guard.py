"""Makes an allocation of device memory while serving visible: there should be none."""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)

#: steps between two looks; one takes a fraction of a millisecond
_EVERY_STEPS = 512


class AllocationGuard:
    """Counts what the caching allocator asked of the driver since `arm`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._armed = False
        self._before = self._logged = 0
        self._steps = 0

    def arm(self) -> None:
        """Serving begins."""
        self._armed = self._device.type == "cuda"
        self._before, self._logged = self._total(), 0

    @property
    def num_allocations(self) -> int:
        """Device allocations since `arm`."""
        return self._total() - self._before

    def stepped(self) -> None:
        """Look now and then, and log what is new."""
        self._steps += 1
        if not self._armed or self._steps % _EVERY_STEPS:
            return
        found = self.num_allocations
        if found > self._logged:
            self._logged = found
            log.warning("memory.allocated_while_serving", extra={"allocations": found})

    def _total(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_device_alloc", 0))
