"""From a model folder to a runner: the one place where the parts of `model` meet."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_svc.layout import DTYPE_BYTES, AdapterLayout, adapter_layout, smallest_page_size
from engine_svc.model.arena import Arena
from engine_svc.model.completion import Completion
from engine_svc.model.device import device_of
from engine_svc.model.device_memory import arena_bytes_of, memory_for
from engine_svc.model.forward_plan import ForwardPlanner
from engine_svc.model.gpu.build import GpuLimits, GpuWorkspace, build_gpu_runner, check_supported
from engine_svc.model.gpu.runner import GpuRunner
from engine_svc.model.llama import Llama
from engine_svc.model.lora import KernelLora, StepLora
from engine_svc.model.lora_views import ViewLora
from engine_svc.model.runner import ModelRunner
from engine_svc.model.seats import SeatState
from engine_svc.model.site_table import SiteTableRows
from engine_svc.model.slot_bindings import SlotBindings
from engine_svc.model.slot_writer import ArenaSlotWriter
from engine_svc.model.vocabulary import AdapterVocabulary
from engine_svc.model.weights import ModelWeights, load_weights
from loraplex.base_model import BaseModelSpec, parse_config_json
from loraplex.status import BaseModelUnsupported, FieldInvalid


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Zero and "auto" mean: chosen by the device. All sizes are counts unless they say bytes."""

    host_region_path: str
    device: str = "auto"
    dtype: str = "auto"
    page_size: int = 0
    arena_bytes: int = 0
    gpu_memory_utilization: float = 0.9
    max_slots: int = 4
    max_lora_rank: int = 256
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    context_tokens: int = 0
    #: on a GPU: launch every step instead of replaying captured graphs
    enforce_eager: bool = False
    #: on a GPU: elementwise and attention kernels begin before the launch ahead of them has ended
    dependent_launches: bool = True
    #: take the GPU's way through a step on a CPU too: slow, for tests
    static_buffers: bool = False
    #: "auto": the folder's checkpoint; "dummy": random numbers, for benchmarks
    load_format: str = "auto"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the composition root needs of a model. `context_tokens` is the limit in effect."""

    runner: ModelRunner | GpuRunner
    slot_writer: ArenaSlotWriter
    base: BaseModelSpec
    layout: AdapterLayout
    page_size: int
    num_pages: int
    context_tokens: int
    device: str
    dtype: str
    weights_bytes: int
    workspace_bytes: int


def load_model(model_dir: Path, options: ModelOptions) -> LoadedModel:
    """Load weights, allocate the arena.

    Raises:
        BaseModelUnsupported: config.json or the checkpoint; names the field or tensors.
        FieldInvalid: an option outside its limit.
        FailedPrecondition: a GPU whose memory does not suffice; names what to change.
    """
    base = _read_base(model_dir)
    device = device_of(options.device)
    dtype_name = _dtype_name(options.dtype, device)
    dtype: torch.dtype = getattr(torch, dtype_name)
    if device.type == "cpu":
        _use_all_cores()
    context_tokens = _context_tokens(options.context_tokens, base.context_tokens)
    page_size = _page_size(options.page_size, base, dtype_name)
    static = options.static_buffers or device.type == "cuda"
    gpu_limits = _gpu_limits(options, context_tokens)
    if static:
        check_supported(base, page_size, gpu_limits.max_rows)
    layout = adapter_layout(base, page_size, dtype_name)
    with memory_for("the weights", "use a GPU with more memory, or end the programs on it"):
        weights = load_weights(model_dir, base, dtype, device, options.load_format)
    workspace = None
    if static:
        with memory_for("the buffers of a step", _smaller_step(options)):
            workspace = GpuWorkspace(base, layout, gpu_limits, dtype, device)
    arena_bytes = arena_bytes_of(
        device, options.arena_bytes, options.gpu_memory_utilization, layout.page_bytes
    )
    with memory_for("the arena and what stands beside it", _smaller_arena(options)):
        arena = Arena(base, page_size, dtype_name, arena_bytes, device)
        rows = SiteTableRows(arena.bytes, layout, options.max_slots, options.max_lora_rank)
        host_region = Path(options.host_region_path)
        completion = Completion(weights, arena, layout)
        slot_writer = ArenaSlotWriter(arena, layout, host_region, options.max_lora_rank, completion)
        slot_writer.lock_early()
        runner: ModelRunner | GpuRunner
        if workspace is None:
            runner = _eager_runner(
                base, weights, arena, layout, rows, slot_writer, options, context_tokens
            )  # fmt: skip
        else:
            on_gpu = device.type == "cuda"
            runner = build_gpu_runner(
                base, weights, arena, layout, rows, slot_writer, workspace,
                warm_up=on_gpu, capture=on_gpu and not options.enforce_eager,
                overlap=options.dependent_launches,
            )  # fmt: skip
    return LoadedModel(
        runner=runner,
        slot_writer=slot_writer,
        base=base,
        layout=layout,
        page_size=page_size,
        num_pages=arena.num_pages,
        context_tokens=context_tokens,
        device=device.type,
        dtype=dtype_name,
        weights_bytes=weights.num_bytes,
        workspace_bytes=runner.num_bytes + rows.num_bytes,
    )


def _eager_runner(
    base: BaseModelSpec,
    weights: ModelWeights,
    arena: Arena,
    layout: AdapterLayout,
    rows: SiteTableRows,
    slot_writer: ArenaSlotWriter,
    options: ModelOptions,
    context_tokens: int,
) -> ModelRunner:
    lora: StepLora
    if arena.numbers.dtype == torch.float32:
        lora = ViewLora(arena.numbers, layout, options.max_slots)
    else:
        lora = KernelLora(
            rows, layout, max(options.max_num_batched_tokens, options.max_num_seqs),
            options.max_slots,
        )  # fmt: skip
    seats = SeatState(options.max_num_seqs, base.vocab_size, arena.bytes.device)
    vocabulary = AdapterVocabulary(arena.numbers, layout, base.vocab_size, lora, options.max_slots)
    model = Llama(base, weights, arena, lora, vocabulary, context_tokens)
    planner = ForwardPlanner(base, arena)
    bindings = SlotBindings(rows, lora, vocabulary, slot_writer)
    return ModelRunner(model, arena, planner, bindings, seats)


def _smaller_step(options: ModelOptions) -> str:
    return (
        f"lower --max-num-seqs ({options.max_num_seqs}) or --max-num-batched-tokens"
        f" ({options.max_num_batched_tokens})"
    )


def _smaller_arena(options: ModelOptions) -> str:
    size = f"--gpu-memory-utilization ({options.gpu_memory_utilization:g})"
    if options.arena_bytes:
        size = f"--arena-bytes ({options.arena_bytes})"
    return f"lower {size}, or {_smaller_step(options)}"


def _gpu_limits(options: ModelOptions, context_tokens: int) -> GpuLimits:
    return GpuLimits(
        max_rows=max(options.max_num_batched_tokens, options.max_num_seqs),
        max_num_seqs=options.max_num_seqs,
        num_slots=options.max_slots,
        context_tokens=context_tokens,
    )


def _read_base(model_dir: Path) -> BaseModelSpec:
    try:
        text = (model_dir / "config.json").read_bytes()
    except OSError as error:
        raise BaseModelUnsupported(
            "config.json", error.strerror or str(error), f"a readable file in {model_dir}"
        ) from error
    return parse_config_json(text)


def _dtype_name(name: str, device: torch.device) -> str:
    if name == "auto":
        return "float32" if device.type == "cpu" else "bfloat16"
    if name not in DTYPE_BYTES:
        limit = ", ".join(["auto", *DTYPE_BYTES])
        raise FieldInvalid("dtype", name, limit, reason="CONFIG_INVALID")
    return name


def _context_tokens(value: int, limit: int) -> int:
    """Two at least: a token of a prompt and one of its answer."""
    if value and not 2 <= value <= limit:
        raise FieldInvalid(
            "max_model_len", value, f"2 to {limit}, or 0 for all", reason="CONFIG_INVALID"
        )
    return value or limit


def _page_size(value: int, base: BaseModelSpec, dtype_name: str) -> int:
    smallest = smallest_page_size(base, dtype_name, at_least=1)
    if value and value < smallest:
        raise FieldInvalid(
            "page_size", value, f"at least {smallest} (one block of any adapter matrix)",
            reason="CONFIG_INVALID",
        )  # fmt: skip
    return value or smallest_page_size(base, dtype_name)


def _use_all_cores() -> None:
    """One thread a core that this process may run on, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
