"""The arena: one allocation at a fixed base, cut into equal pages, for KV and adapters alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine_svc.layout import kv_page_bytes
from loraplex.base_model import BaseModelSpec
from loraplex.status import FieldInvalid


class Arena:
    """Two views of the same memory: bytes (adapters) and numbers of the compute dtype (KV).

    A page is page_size positions of all layers: [layer, k|v, position, kv_head, head_dim]. The base
    address never changes. Fresh memory is not touched: the operating system gives it when a page is
    first written.
    """

    def __init__(
        self,
        base: BaseModelSpec,
        page_size: int,
        dtype_name: str,
        arena_bytes: int,
        device: torch.device,
    ) -> None:
        """Raises: FieldInvalid when arena_bytes holds no page."""
        self.page_size = page_size
        self.page_bytes = kv_page_bytes(base, page_size, dtype_name)
        self.num_pages = arena_bytes // self.page_bytes
        if self.num_pages < 1:
            raise FieldInvalid(
                "arena_bytes", arena_bytes, f"at least one page of {self.page_bytes} bytes",
                reason="CONFIG_INVALID",
            )  # fmt: skip
        dtype: torch.dtype = getattr(torch, dtype_name)
        size = self.num_pages * self.page_bytes
        #: [num_pages · page_bytes] uint8
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        #: the same memory as compute-dtype numbers, one dimension
        self.numbers = self.bytes.view(dtype)
        self._pages = self.numbers.view(self.num_pages, -1)
        #: the same, [num_pages, layer, k|v, position, kv_head, head_dim]
        self.kv = self.numbers.view(
            self.num_pages, base.num_layers, 2, page_size, base.num_kv_heads, base.head_dim
        )
        self._byte_pages = self.bytes.view(self.num_pages, self.page_bytes)

    def page(self, page_id: int) -> torch.Tensor:
        """[page_bytes] uint8 view of one page."""
        return self._byte_pages[page_id]

    def copy(self, source: int, target: int) -> None:
        self._pages[target].copy_(self._pages[source])

    def clear(self, page_ids: Sequence[int]) -> None:
        """Zero pages before KV is first written: attention reads whole pages, masked numbers must
        be finite."""
        for page_id in page_ids:
            self._pages[page_id].zero_()
