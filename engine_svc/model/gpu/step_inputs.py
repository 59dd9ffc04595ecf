"""What the kernels of a step read besides weights and arena: int32 at fixed addresses.

One block of device memory, filled by one copy a step from page-locked memory of the same layout.
Steps of decodes alone have a small block of their own, so that they copy no more than they need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.model.gpu.staging import StagingRing

Array = npt.NDArray[np.int32]
#: fields begin at multiples of so many numbers: 128 bytes
_ALIGN = 32


@dataclass(frozen=True, slots=True)
class InputSizes:
    """Capacities. `rank_blocks`: of one adapter; `prefill_tiles` 0: a step of decodes alone."""

    rows: int
    decodes: int
    lora_tiles: int
    rank_blocks: int
    prefill_tiles: int
    updates: int

    def fields(self) -> dict[str, tuple[int, ...]]:
        """Name → shape, in the order of the block."""
        return {
            "num_tiles": (1,),
            "num_shrink_tiles": (1,),
            "num_updates": (1,),
            "num_prefill_tiles": (1,),
            "token_ids": (self.rows,),
            "positions": (self.rows,),
            "row_seat": (self.rows,),
            "row_slot": (self.rows,),
            "decode_rows": (self.decodes,),
            "sample_rows": (self.decodes,),
            "tiles": (self.lora_tiles, 3),
            "shrink_tiles": (self.lora_tiles * self.rank_blocks, 4),
            "prefill_tiles": (self.prefill_tiles, 4),
            "updates": (self.updates, 2),
        }


class StepInputs:
    """The block, its named views, and the ring that fills it.

    Views [..]: see InputSizes.fields; token_ids −1: the seat's last token; row_seat, row_slot −1:
    padding or none; decode_rows −1: none; sample_rows: rows of which a token is sampled, padded
    with row 0; tiles and shrink_tiles as kernels.lora_tables.SegmentPlan; prefill_tiles (first row,
    rows, seat, start).
    """

    def __init__(self, sizes: InputSizes, ring_depth: int, device: torch.device) -> None:
        self.sizes = sizes
        places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        total = 0
        for name, shape in sizes.fields().items():
            count = math.prod(shape)
            places[name] = (slice(total, total + count), shape)
            total += -(-count // _ALIGN) * _ALIGN
        self._total = total
        self._block = torch.zeros(total, dtype=torch.int32, device=device)
        self._ring = StagingRing(ring_depth, total, device)
        self._staged: list[dict[str, Array]] = [
            {name: buffer[at].reshape(shape) for name, (at, shape) in places.items()}
            for buffer in self._ring.arrays
        ]
        self.on_device: dict[str, torch.Tensor] = {
            name: self._block[at].view(shape) for name, (at, shape) in places.items()
        }

    @property
    def num_bytes(self) -> int:
        return self._block.nbytes

    def acquire(self) -> dict[str, Array]:
        """The same views of the next staging buffer; what is not written keeps an older step's
        numbers."""
        return self._staged[self._ring.acquire()]

    def send(self) -> None:
        """Copy the acquired buffer to the device, on the current stream."""
        self._ring.copy_to(self._block, self._total)
