"""What the `ops` benchmark measures on: base weights on a device, and the time of whole layers."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.ops.clock import Clock
from benchmarks.ops.layers import Layers, base_weights, site_buffers
from benchmarks.ops.shapes import Cell, SiteShape, build_adapters
from benchmarks.shared.bandwidth import copy_bytes_per_s


@dataclass
class Bench:
    clock: Clock
    sites: tuple[SiteShape, ...]
    dtype: torch.dtype
    num_layers: int
    repeats: int

    def __post_init__(self) -> None:
        device = self.clock.device
        self.weights = base_weights(self.sites, self.num_layers, self.dtype, device)
        self.copy_bytes_a_us = copy_bytes_per_s(device) / 1e6
        self.flush_us: dict[int, float] = {}

    def layers(self, shape: Cell) -> Layers:
        weights = self.weights[: 2 if shape.is_prefill else None]
        first = weights[0][0]
        num_slots = max(8, len(shape.rows))
        adapters = build_adapters(
            shape, self.sites, len(weights), num_slots, self.dtype, first.device
        )
        rank = max(64, *shape.ranks) if len(shape.ranks) > 1 else max(64, shape.ranks[0])
        buffers = site_buffers(self.sites, shape.tokens, rank, adapters.plan.tile_rows, first)
        return Layers(self.clock, weights, adapters, buffers)

    def in_layer(self, layers: Layers, repeats: int) -> tuple[list[float], list[float]]:
        """(differences, times with adapters) of one layer, µs."""
        with_us, base_us = self.clock.times_us([layers.with_adapters, layers.base], repeats)
        count = len(layers.weights)
        differences = [(a - b) / count for a, b in zip(with_us, base_us, strict=True)]
        return differences, [a / count for a in with_us]

    def pair(
        self, layers: Layers, repeats: int, *, shrinks: bool = True, expands: bool = True
    ) -> list[float]:
        """Shrink and delta (or one of them) of one layer after a flush before each site, µs."""
        with_us, flush_us = self.clock.times_us(
            [
                lambda: layers.all_pairs(shrinks, expands),
                lambda: layers.all_pairs(shrinks=False, expands=False),
            ],
            repeats,
        )
        return [(a - median(flush_us)) / len(layers.weights) for a in with_us]
