"""The model on one page for a GPU: the families of model/llama.py over static buffers.

T rows of a step, padding included; C hidden size, H heads, Hk KV heads, D head dim, I intermediate
size. Every launch reads and writes fixed addresses, nothing is allocated and nothing waits, so the
whole of `run` may be captured. LoRA runs beside each GEMM; the kernel that reads the GEMM's output
adds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from engine_svc.model.arena import Arena
from engine_svc.model.gpu.buffers import Buffers, TrunkBuffers
from engine_svc.model.gpu.launches import trunk_launches
from engine_svc.model.gpu.site_deltas import SiteDeltas, StepAdapters
from engine_svc.model.linear import Linear
from engine_svc.model.rotary import rope_tables
from engine_svc.model.weights import ModelWeights
from kernels.decode_attention import DecodeScratch, decode_attention
from kernels.embed_rows import embed_rows
from kernels.lora_tables import LoraDelta
from kernels.prefill_attention import prefill_attention
from kernels.scatter_pages import scatter_pages
from loraplex.base_model import BaseModelSpec

#: positions of a layer's fused linears in engine_svc.layout.SITES
QKV, O, GATE_UP, DOWN = range(4)  # noqa: E741


@dataclass(frozen=True, slots=True)
class TrunkStep:
    """Views of a step's inputs on the device, all int32.

    Args:
        token_ids, positions, row_seat: [T]; token −1: the seat's last one; seat −1: padding.
        decode_rows: [B], rows that are one-token chunks, −1 = none.
        prefill_tiles, num_prefill_tiles: [cap, 4] and [1]; None: a step of decodes alone.
        updates, num_updates: [cap, 2] and [1], what changes in the page table first.
        adapters: None: no row has an adapter.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    row_seat: torch.Tensor
    decode_rows: torch.Tensor
    prefill_tiles: torch.Tensor | None
    num_prefill_tiles: torch.Tensor
    updates: torch.Tensor
    num_updates: torch.Tensor
    adapters: StepAdapters | None


class Projection:
    """A base linear that writes into a caller's buffer."""

    def __init__(self, linear: Linear) -> None:
        self._transposed, self._bias = linear.plain_weight().t(), linear.bias

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out [T, out_features] ← x·Wᵀ + b."""
        if self._bias is None:
            torch.mm(x, self._transposed, out=out)
        else:
            torch.addmm(self._bias, x, self._transposed, out=out)


class Trunk:
    """Embeddings, layers, final norm."""

    def __init__(
        self,
        base: BaseModelSpec,
        weights: ModelWeights,
        arena: Arena,
        deltas: SiteDeltas,
        buffers: TrunkBuffers,
        page_table: torch.Tensor,
        last_token: torch.Tensor,
        scratch: DecodeScratch,
        context_tokens: int,
        *,
        overlap: bool,
    ) -> None:
        """Args: page_table [seats, max_pages] int32; last_token [seats]; overlap:
        launches.py."""
        self._base, self._weights, self._pages = base, weights, arena.kv
        self._deltas, self._buffers = deltas, buffers
        self._page_table, self._last_token, self._scratch = page_table, last_token, scratch
        device = arena.bytes.device
        self._launch = trunk_launches(arena.bytes, overlap=overlap)
        # [positions, 1, R/2]
        self._cos, self._sin = rope_tables(base, context_tokens, arena.numbers.dtype, device)
        self._sites = [tuple(Projection(site) for site in layer.sites) for layer in weights.layers]

    def run(
        self, step: TrunkStep, amend: Callable[[torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Hidden states after the final norm [T, C], valid until the next run; keys and values are
        in the arena. `amend` changes the embeddings [T, C] in place."""
        weights, eps = self._weights, self._base.rms_norm_eps
        b = self._buffers.rows(step.token_ids.shape[0])
        scatter_pages(step.updates, step.num_updates, self._page_table)
        embed_rows(
            step.token_ids, step.row_seat, self._last_token, weights.embedding, b.projected,
            b.residual,
        )  # fmt: skip
        if amend is not None:
            amend(b.projected)
        self._launch.add_rms_norm(
            b.projected, b.residual, weights.layers[0].input_norm, eps, b.x, None
        )
        for index, layer in enumerate(weights.layers):
            self._attention(index, step, b)
            delta = self._project(index, O, b.attended, b.projected, step, b)
            self._launch.add_rms_norm(b.projected, b.residual, layer.post_norm, eps, b.x, delta)
            delta = self._project(index, GATE_UP, b.x, b.gate_up, step, b)
            self._launch.silu_mul_delta(b.gate_up, b.inner, delta)
            delta = self._project(index, DOWN, b.inner, b.projected, step, b)
            last = index + 1 == len(weights.layers)
            norm = weights.final_norm if last else weights.layers[index + 1].input_norm
            self._launch.add_rms_norm(b.projected, b.residual, norm, eps, b.x, delta)
        return b.x

    def hidden(self, num_rows: int) -> torch.Tensor:
        """Where `run` of so many rows leaves its result."""
        return self._buffers.rows(num_rows).x

    def _attention(self, index: int, step: TrunkStep, b: Buffers) -> None:
        base, layer = self._base, self._weights.layers[index]
        delta = self._project(index, QKV, b.x, b.qkv, step, b)
        self._launch.rope_store(
            b.qkv, step.positions, step.row_seat, self._page_table, self._pages, index,
            self._cos, self._sin, b.q, layer.q_norm, layer.k_norm, base.rms_norm_eps,
            index not in base.layers_without_rope, delta,
        )  # fmt: skip
        # a dependent launch without any decode would end before the keys are written
        attend = self._launch.decode_attention if step.prefill_tiles is None else decode_attention
        attend(
            b.q, self._pages, self._page_table, step.decode_rows, step.row_seat, step.positions,
            index, base.num_kv_heads, base.sliding_window, b.attended, self._scratch,
        )  # fmt: skip
        if step.prefill_tiles is not None:
            prefill_attention(
                b.q, self._pages, self._page_table, step.prefill_tiles, step.num_prefill_tiles,
                index, base.num_kv_heads, base.sliding_window, b.attended,
            )  # fmt: skip

    def _project(
        self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor, step: TrunkStep, b: Buffers
    ) -> LoraDelta | None:
        """out ← base(x); what adapters add to it, for the consumer of `out`."""
        if step.adapters is None:
            self._sites[layer][site](x, out)
            return None
        gemm = partial(self._sites[layer][site], x, out)
        return self._deltas.beside(gemm, layer, site, x, step.adapters, b.deltas[site])
