"""Where the trunk's intermediate results lie: allocated once, at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_svc.layout import AdapterLayout
from loraplex.base_model import BaseModelSpec


@dataclass(frozen=True, slots=True)
class Buffers:
    """For T rows, compute dtype, rows contiguous.

    Args:
        residual, x, projected: [T, C]; x is what a site reads, projected what o, down and the
            embeddings give.
        qkv: [T, (H + 2·Hk)·D].
        q: [T, H, D].
        attended: [T, H·D].
        gate_up: [T, 2·I].
        inner: [T, I].
        deltas: of the sites in the order of engine_svc.layout.SITES, [T, out_features] each, in
            the same memory: a site's delta is consumed before the next site's is written.
    """

    residual: torch.Tensor
    x: torch.Tensor
    projected: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attended: torch.Tensor
    gate_up: torch.Tensor
    inner: torch.Tensor
    deltas: tuple[torch.Tensor, ...]


class TrunkBuffers:
    """Memory for `max_rows` rows; `rows(n)` are views of its first part, made once an n."""

    def __init__(
        self,
        base: BaseModelSpec,
        layout: AdapterLayout,
        max_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        hidden, inner = base.hidden_size, base.intermediate_size
        self._heads, self._dim = base.num_heads, base.head_dim
        self._sites = tuple(site.out_features for site in layout.sites)
        widths = {
            "residual": hidden, "x": hidden, "projected": hidden,
            "qkv": self._sites[0], "q": base.q_size, "attended": base.q_size,
            "gate_up": self._sites[2], "inner": inner, "delta": max(self._sites),
        }  # fmt: skip
        self._memory = {
            name: torch.zeros(max_rows * width, dtype=dtype, device=device)
            for name, width in widths.items()
        }
        self._widths = widths
        self._views: dict[int, Buffers] = {}

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def rows(self, num_rows: int) -> Buffers:
        found = self._views.get(num_rows)
        if found is None:
            found = self._views[num_rows] = self._of(num_rows)
        return found

    def _of(self, rows: int) -> Buffers:
        def part(name: str, width: int) -> torch.Tensor:
            return self._memory[name][: rows * width].view(rows, width)

        parts = {name: part(name, width) for name, width in self._widths.items()}
        del parts["delta"]
        parts["q"] = parts["q"].view(rows, self._heads, self._dim)
        return Buffers(**parts, deltas=tuple(part("delta", width) for width in self._sites))
