"""A few layers of base GEMMs with and without adapters, on one cell of the `ops` benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from benchmarks.ops.clock import Clock
from benchmarks.ops.consumer import consume
from benchmarks.ops.shapes import WEIGHT_STD, Adapters, SiteShape
from kernels.gemm_processors import gemm_processors
from kernels.lora_delta import lora_delta
from kernels.lora_delta_triton import lora_delta_triton
from kernels.lora_shrink import lora_shrink
from kernels.lora_shrink_triton import lora_shrink_triton
from kernels.lora_site_tuning import Place, SiteTuning, site_tuning
from kernels.lora_tables import RANK_BLOCK, LoraDelta
from kernels.lora_tuning import DeltaTuning, ShrinkTuning, num_splits, shrink_tuning

#: a bf16 result against fp32: roundings of u, of the delta, of weights that are exact
ERROR_LIMIT = 1e-2


@dataclass(frozen=True, slots=True)
class Choice:
    """How one site is computed. None: as it is in force."""

    shrink: ShrinkTuning | None = None
    delta: DeltaTuning | None = None
    place: Place | None = None

    def over(self, standing: SiteTuning) -> SiteTuning:
        shrink, delta = self.shrink or standing.shrink, self.delta or standing.delta
        if self.place is not None:
            return self.place.of(shrink, delta)
        return replace(standing, shrink=shrink, delta=delta)


@dataclass
class SiteBuffers:
    x: torch.Tensor
    y: torch.Tensor
    out: torch.Tensor
    u: torch.Tensor
    delta: torch.Tensor


@dataclass
class Layers:
    """`weights[layer][site]` [out, in]; buffers are shared by the layers, as in the engine."""

    clock: Clock
    weights: list[list[torch.Tensor]]
    adapters: Adapters
    buffers: list[SiteBuffers]
    choices: list[Choice] = field(default_factory=lambda: [Choice()] * 4)
    only_site: int | None = None
    _expected: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def base(self) -> None:
        """The layers without adapters."""
        for weights in self.weights:
            for site, weight in enumerate(weights):
                if self.only_site in (None, site):
                    own = self.buffers[site]
                    torch.mm(own.x, weight.T, out=own.y)
                    consume(own.y, None, own.out)

    def with_adapters(self) -> None:
        """The layers with adapters: shrink and delta beside each GEMM, its consumer adds."""
        for layer, weights in enumerate(self.weights):
            for site, weight in enumerate(weights):
                if self.only_site in (None, site):
                    own, tuning = self.buffers[site], self.tuning(site)
                    self.ahead(layer, site, tuning)
                    with gemm_processors(tuning.processors, self.clock.device):
                        torch.mm(own.x, weight.T, out=own.y)
                    if tuning.order == "GEMM":
                        with self.clock.beside(tuning.priority):
                            self.pair(layer, site)
                    if tuning.order == "after":
                        self.pair(layer, site)
                    else:
                        self.clock.join()
                    consume(own.y, self.stored(layer, site), own.out)

    def tuning(self, site: int) -> SiteTuning:
        shape, rows = self.adapters.sites[site], self.buffers[site].x.shape[0]
        tile_rows = self.adapters.plan.tile_rows
        standing = site_tuning(shape.in_features, shape.out_features, rows, tile_rows)
        return self.choices[site].over(standing)

    def ahead(self, layer: int, site: int, tuning: SiteTuning) -> None:
        """What is launched before the GEMM."""
        self.clock.mark()
        if tuning.order == "branch":
            with self.clock.beside(tuning.priority):
                self.pair(layer, site)

    def pair(self, layer: int, site: int) -> None:
        self.shrink(layer, site)
        self.expand(layer, site)

    def shrink(self, layer: int, site: int) -> None:
        own, adapters = self.buffers[site], self.adapters
        first_entry, num_slices = adapters.first_entry(layer, site), own.u.shape[2]
        lora_shrink_triton(
            own.x, adapters.table, adapters.plan, first_entry, num_slices, own.u,
            self.tuning(site).shrink,
        )  # fmt: skip

    def expand(self, layer: int, site: int) -> None:
        own, adapters = self.buffers[site], self.adapters
        first_entry, columns = adapters.first_entry(layer, site), adapters.columns[site]
        lora_delta_triton(
            own.u,
            adapters.table,
            adapters.plan,
            first_entry,
            columns,
            adapters.site_cell(layer, site),
            own.delta,
            self.tuning(site).delta,
        )

    def stored(self, layer: int, site: int) -> LoraDelta:
        own, adapters = self.buffers[site], self.adapters
        cell = adapters.site_cell(layer, site)
        return LoraDelta(own.delta, adapters.row_slot, adapters.table, cell)

    def all_pairs(self, shrinks: bool = True, expands: bool = True) -> None:
        """The peers' way: each site's two launches alone, with cold caches."""
        for layer in range(len(self.weights)):
            for site in range(len(self.adapters.sites)):
                if self.only_site in (None, site):
                    self.clock.flush()
                    if shrinks:
                        self.shrink(layer, site)
                    if expands:
                        self.expand(layer, site)

    def worst_error(self) -> float:
        """‖delta − fp32‖ / ‖fp32‖ of the last layer's sites, as the graph leaves them; NaN where
        something was not written."""
        for own in self.buffers:
            for tensor in (own.u, own.delta, own.out):
                tensor.fill_(torch.nan)
        self.clock.run(self.with_adapters)
        layer, worst = len(self.weights) - 1, 0.0
        sites = [self.only_site] if self.only_site is not None else range(len(self.buffers))
        for site in sites:
            own = self.buffers[site]
            expected = self.expected(layer, site)
            for found, right in (
                (own.delta, expected),
                (own.out, own.y.float() + expected),
            ):
                error = (found.float() - right).norm() / right.norm()
                worst = max(worst, float(error)) if error.isfinite() else float("nan")
        return worst

    def expected(self, layer: int, site: int) -> torch.Tensor:
        """[T, N] fp32 from the references, kept; their indices on the host, so that they do not
        wait."""
        if (layer, site) in self._expected:
            return self._expected[layer, site]
        own, adapters = self.buffers[site], self.adapters
        table = adapters.table
        names = ("a_off", "b_off", "rank", "scale", "g_off", "c_off", "live")
        host = replace(table, **{name: getattr(table, name).cpu() for name in names})
        columns = adapters.columns[site]
        first_entry, cell = adapters.first_entry(layer, site), adapters.site_cell(layer, site)
        u = torch.zeros_like(own.u[:1])
        lora_shrink(own.x, host, adapters.plan, first_entry, columns.num_slices, u)
        delta = torch.empty_like(own.delta)
        lora_delta(u, host, adapters.plan, first_entry, columns, cell, delta)
        self._expected[layer, site] = delta.float()
        return self._expected[layer, site]


def base_weights(
    sites: tuple[SiteShape, ...], num_layers: int, dtype: torch.dtype, device: torch.device
) -> list[list[torch.Tensor]]:
    """[layer][site] [out_features, in_features], random."""
    shapes = [(site.out_features, site.in_features) for site in sites]
    return [
        [torch.empty(shape, dtype=dtype, device=device).normal_(std=WEIGHT_STD) for shape in shapes]
        for _ in range(num_layers)
    ]


def site_buffers(
    sites: tuple[SiteShape, ...], tokens: int, max_rank: int, tile_rows: int, weight: torch.Tensor
) -> list[SiteBuffers]:  # fmt: skip
    """Inputs and outputs of a cell, like `weight` in dtype and device."""
    rank = -(-max_rank // RANK_BLOCK) * RANK_BLOCK
    made = []
    for site in sites:
        u = (num_splits(site.in_features, tile_rows), tokens, len(site.widths), rank)
        y = weight.new_empty((tokens, site.out_features))
        made.append(
            SiteBuffers(
                weight.new_empty((tokens, site.in_features)).normal_(),
                y,
                torch.empty_like(y),
                torch.empty(u, device=weight.device),
                torch.empty_like(y),
            )
        )
    return made


def splits_of(site: SiteShape, tuning: ShrinkTuning | None, tile_rows: int) -> int:
    """Partials of a site under a candidate."""
    chosen = tuning or shrink_tuning(site.in_features, tile_rows)
    return -(-site.in_features // chosen.split_k)
