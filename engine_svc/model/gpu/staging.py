"""Page-locked host memory that a step fills and the device reads later: a ring guarded by
events."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine_svc.model.gpu.cuda import new_event


class StagingRing:
    """`depth` buffers of `size` int32. A buffer is filled again only when its last copy is done.

    The copy is ordered on the current stream; on a CPU it happens at once.
    """

    def __init__(self, depth: int, size: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        shape = (depth, size)
        self._buffers = torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_gpu)
        #: [depth, size]
        self.arrays: npt.NDArray[np.int32] = self._buffers.numpy()
        self._copied = [new_event() for _ in range(depth if self._on_gpu else 0)]
        self._next = 0

    def acquire(self) -> int:
        """Index of the buffer to fill before `copy_to`. Waits while the device still reads it."""
        if self._on_gpu:
            self._copied[self._next].synchronize()
        return self._next

    def copy_to(self, target: torch.Tensor, count: int) -> None:
        """The first `count` numbers of the acquired buffer into target [≥ count] int32."""
        target[:count].copy_(self._buffers[self._next, :count], non_blocking=True)
        if self._on_gpu:
            self._copied[self._next].record()
        self._next = (self._next + 1) % len(self.arrays)
