"""Host memory to a device through a small ring of pinned buffers: one copy on the host, no more.

Threads of torch fill one buffer, from a mapped file say, while the device still reads the other.
"""

from __future__ import annotations

import torch

CHUNK_BYTES = 32 << 20
NUM_BUFFERS = 3


class Staging:
    """A ring of `num_buffers` buffers of `chunk_bytes`; pinned where the device is a GPU."""

    def __init__(
        self,
        device: torch.device,
        chunk_bytes: int = CHUNK_BYTES,
        num_buffers: int = NUM_BUFFERS,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        on_gpu = device.type == "cuda"
        self._buffers = [
            torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            for _ in range(num_buffers)
        ]
        #: of each buffer: when the device has read it
        self._read: list[torch.cuda.Event] = []
        if on_gpu:
            self._read = [torch.cuda.Event() for _ in range(num_buffers)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """target ← source, of equal shape and dtype; the source may be freed when this returns.

        Args: source on the host, target contiguous on the device; ready on its current stream.
        """
        from_bytes = source.contiguous().view(-1).view(torch.uint8)
        to_bytes = target.view(-1).view(torch.uint8)
        for start in range(0, len(from_bytes), self._chunk_bytes):
            piece = from_bytes[start : start + self._chunk_bytes]
            index, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
            buffer = self._buffers[index][: len(piece)]
            if self._read:
                self._read[index].synchronize()
            buffer.copy_(piece)
            to_bytes[start : start + len(piece)].copy_(buffer, non_blocking=True)
            if self._read:
                self._read[index].record()
