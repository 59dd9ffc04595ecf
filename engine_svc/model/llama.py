"""The model on one page: Llama, Mistral, Phi-3, Qwen2, Qwen3 and SmolLM3, as their config says.

T rows of a step, C hidden size, H heads, Hk KV heads, D head dim, I intermediate size, V
vocabulary. Rows know nothing of each other but through attention; LoRA is added to each fused
projection's output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine_svc.model.arena import Arena
from engine_svc.model.forward_plan import ForwardPlan
from engine_svc.model.lora import Segment, StepLora
from engine_svc.model.rotary import rope_tables
from engine_svc.model.vocabulary import AdapterVocabulary
from engine_svc.model.weights import LayerWeights, ModelWeights
from kernels.paged_attention import paged_attention, write_kv
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import rope
from kernels.silu_mul import silu_mul
from loraplex.base_model import BaseModelSpec

#: positions of a layer's fused linears in engine_svc.layout.SITES
QKV, O, GATE_UP, DOWN = range(4)  # noqa: E741


class Llama:
    """The trunk and the output head over one arena."""

    def __init__(
        self,
        base: BaseModelSpec,
        weights: ModelWeights,
        arena: Arena,
        lora: StepLora,
        vocabulary: AdapterVocabulary,
        context_tokens: int,
    ) -> None:
        self._base, self._weights, self._arena, self._lora = base, weights, arena, lora
        self._vocabulary = vocabulary
        self._dtype = arena.numbers.dtype
        self._cos, self._sin = rope_tables(base, context_tokens, self._dtype, arena.bytes.device)

    def forward(self, plan: ForwardPlan, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states after the final norm [T, C]; keys and values are written to the arena."""
        weights, eps = self._weights, self._base.rms_norm_eps
        cos = self._cos.index_select(0, plan.positions)  # [T, 1, R/2]
        sin = self._sin.index_select(0, plan.positions)
        self._lora.begin(plan.segments)
        residual = F.embedding(token_ids, weights.embedding).to(self._dtype)  # [T, C]
        self._vocabulary.embed(plan.segments, token_ids, residual)
        x = rms_norm(residual, weights.layers[0].input_norm, eps)
        for index, layer in enumerate(weights.layers):
            attended = self._attention(index, layer, plan, x, cos, sin)
            x = add_rms_norm(attended, residual, layer.post_norm, eps)  # [T, C]
            fed = self._feed_forward(index, layer, x)
            last = index + 1 == len(weights.layers)
            norm = weights.final_norm if last else weights.layers[index + 1].input_norm
            x = add_rms_norm(fed, residual, norm, eps)
        return x

    def logits(self, hidden: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """[n, C] → [n, V] fp32; segments of the n rows by slot."""
        return self._vocabulary.logits(self._weights.head, hidden, segments).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        plan: ForwardPlan,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        base, rows = self._base, x.shape[0]
        heads, kv_heads, dim = base.num_heads, base.num_kv_heads, base.head_dim
        qkv = layer.qkv(x)  # [T, (H + 2·Hk)·D]
        self._lora.add(index, QKV, x, qkv)
        split = qkv.view(rows, heads + 2 * kv_heads, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            split[:, :heads] = rms_norm(split[:, :heads], layer.q_norm, base.rms_norm_eps)
            keys = split[:, heads : heads + kv_heads]
            split[:, heads : heads + kv_heads] = rms_norm(keys, layer.k_norm, base.rms_norm_eps)
        turned = split[:, : heads + kv_heads]  # [T, H + Hk, D]
        if index not in base.layers_without_rope:
            turned = rope(turned, cos, sin)
        numbers = self._arena.numbers
        write_kv(numbers, plan.attention, index, turned[:, heads:], split[:, heads + kv_heads :])
        q = turned[:, :heads].contiguous()
        mixed = paged_attention(q, numbers, plan.attention, index, kv_heads)  # [T, H·D]
        out = layer.o(mixed)  # [T, C]
        self._lora.add(index, O, mixed, out)
        return out

    def _feed_forward(self, index: int, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(x)  # [T, 2·I]
        self._lora.add(index, GATE_UP, x, gate_up)
        inner = silu_mul(gate_up)  # [T, I]
        out = layer.down(inner)  # [T, C]
        self._lora.add(index, DOWN, inner, out)
        return out
