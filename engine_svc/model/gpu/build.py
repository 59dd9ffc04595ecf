"""Where the parts of the GPU's way meet: everything is allocated here, before serving."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_svc.layout import RANK_BLOCK, AdapterLayout
from engine_svc.model.arena import Arena
from engine_svc.model.gpu.allocation_guard import AllocationGuard
from engine_svc.model.gpu.buckets import decode_buckets
from engine_svc.model.gpu.buffers import TrunkBuffers
from engine_svc.model.gpu.output_head import OutputHead
from engine_svc.model.gpu.page_table import PageTable
from engine_svc.model.gpu.runner import GpuRunner
from engine_svc.model.gpu.sampler import GpuSampler
from engine_svc.model.gpu.sampler_state import SamplerState
from engine_svc.model.gpu.site_deltas import SiteDeltas
from engine_svc.model.gpu.step_shapes import StepLimits
from engine_svc.model.gpu.stepper import Stepper
from engine_svc.model.gpu.timeline import Timeline
from engine_svc.model.gpu.trunk import Trunk
from engine_svc.model.gpu.warm_up import WarmUp
from engine_svc.model.lora import KernelLora
from engine_svc.model.prompt_logits import BLOCK_ROWS
from engine_svc.model.site_table import SiteTableRows
from engine_svc.model.slot_bindings import SlotBindings
from engine_svc.model.slot_writer import ArenaSlotWriter
from engine_svc.model.vocabulary import AdapterVocabulary
from engine_svc.model.weights import ModelWeights
from kernels.attention_reference import MAX_GROUP
from kernels.decode_attention import decode_scratch
from kernels.prefill_attention import tile_rows
from loraplex.base_model import BaseModelSpec
from loraplex.status import BaseModelUnsupported, FieldInvalid

#: steps that may be in flight: one runs, one is enqueued
MAX_RUN_AHEAD = 1
_RING_DEPTH = MAX_RUN_AHEAD + 2
MIN_PAGE_SIZE = 16
#: rows of a step: the second size of a launch's grid
MAX_STEP_ROWS = 65_535


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Counts. `max_rows`: tokens of a step at most."""

    max_rows: int
    max_num_seqs: int
    num_slots: int
    context_tokens: int


def check_supported(base: BaseModelSpec, page_size: int, max_rows: int) -> None:
    """Raises: FieldInvalid, BaseModelUnsupported: what the kernels do not take."""
    if max_rows > MAX_STEP_ROWS:
        raise FieldInvalid(
            "max_num_batched_tokens", max_rows, f"at most {MAX_STEP_ROWS} on a GPU",
            reason="CONFIG_INVALID",
        )  # fmt: skip
    if page_size < MIN_PAGE_SIZE or page_size & (page_size - 1):
        raise FieldInvalid(
            "page_size", page_size, f"a power of two from {MIN_PAGE_SIZE} on a GPU",
            reason="CONFIG_INVALID",
        )  # fmt: skip
    group = base.num_heads // base.num_kv_heads
    if group > MAX_GROUP:
        raise BaseModelUnsupported(
            "num_attention_heads", str(base.num_heads),
            f"at most {MAX_GROUP * base.num_kv_heads} on a GPU: {MAX_GROUP} a key-value head",
        )  # fmt: skip


class GpuWorkspace:
    """What does not depend on the arena, allocated before the arena takes the rest."""

    def __init__(
        self,
        base: BaseModelSpec,
        layout: AdapterLayout,
        limits: GpuLimits,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.limits, self.device = limits, device
        self.buffers = TrunkBuffers(base, layout, limits.max_rows, dtype, device)
        self.scratch = decode_scratch(
            limits.max_num_seqs, base.num_heads, base.num_kv_heads, base.head_dim, device
        )
        self.sampler_state = SamplerState(
            limits.max_num_seqs, base.vocab_size, limits.context_tokens, device
        )
        self.sampler = GpuSampler(
            self.sampler_state, limits.max_num_seqs, device, ring_depth=_RING_DEPTH
        )
        self.head_rows = decode_buckets(limits.max_num_seqs)


def build_gpu_runner(
    base: BaseModelSpec,
    weights: ModelWeights,
    arena: Arena,
    layout: AdapterLayout,
    site_table: SiteTableRows,
    slot_writer: ArenaSlotWriter,
    workspace: GpuWorkspace,
    *,
    warm_up: bool,
    capture: bool,
    overlap: bool,
) -> GpuRunner:
    """Args: warm_up, run every kind of step once; capture, make graphs of them (a GPU only);
    overlap, see launches.py."""
    limits, device = workspace.limits, workspace.device
    max_pages = min(-(-limits.context_tokens // arena.page_size), arena.num_pages)
    page_table = PageTable(limits.max_num_seqs, max_pages, device)
    deltas = SiteDeltas(site_table, layout, limits.max_rows)
    trunk = Trunk(
        base, weights, arena, deltas, workspace.buffers,
        page_table.device_table, workspace.sampler.last_token, workspace.scratch,
        limits.context_tokens, overlap=overlap,
    )  # fmt: skip
    prefill_rows = tile_rows(base.num_heads, base.num_kv_heads)
    rank_blocks = -(-site_table.max_rank // RANK_BLOCK)
    shapes = StepLimits(
        limits.max_rows, limits.max_num_seqs, limits.num_slots, rank_blocks, prefill_rows
    )
    stepper = Stepper(trunk, page_table, shapes, site_table.rank_blocks, _RING_DEPTH, device)
    head_lora = KernelLora(site_table, layout, BLOCK_ROWS, limits.num_slots)
    vocabulary = AdapterVocabulary(
        arena.numbers, layout, base.vocab_size, head_lora, limits.num_slots
    )
    head = OutputHead(weights.head, vocabulary, workspace.head_rows, arena.numbers)
    bindings = SlotBindings(site_table, head_lora, vocabulary, slot_writer)
    guard = AllocationGuard(device)
    runner = GpuRunner(
        stepper,
        head,
        workspace.sampler,
        vocabulary,
        bindings,
        arena,
        Timeline(device, MAX_RUN_AHEAD + 1),
        guard,
        num_bytes=sum(
            part.num_bytes for part in (workspace.buffers, workspace.sampler, deltas, stepper, head)
        ),
    )
    if warm_up:
        arena.page(0).zero_()
        WarmUp(
            runner, stepper, layout, page_size=arena.page_size,
            longest=min(max_pages * arena.page_size, limits.context_tokens),
            max_num_seqs=limits.max_num_seqs, max_rows=limits.max_rows,
            vocab_size=base.vocab_size, rank_blocks=rank_blocks,
        ).run(capture=capture)  # fmt: skip
        slot_writer.warm_up()
    # weights and buffers were filled on another stream
    runner.wait()
    guard.arm()
    return runner
