"""The composition root: where model, core, adapters and frontend meet.

`build_core` is what the core's process runs; `open_local_engine` joins everything in one process,
for `enginectl generate` and tests, behind the same Protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine_svc.adapters.folder_weights import FolderWeights, bytes_for_folders
from engine_svc.adapters.host_region import HostRegion
from engine_svc.core.engine import EngineCore
from engine_svc.core.limits import adapters_ahead
from engine_svc.core.ports import Runner, WeightsSource
from engine_svc.floor import FloorMeter, StepFloor
from engine_svc.frontend.generate import Serving
from engine_svc.frontend.inputs import PromptReader
from engine_svc.frontend.models import Models
from engine_svc.frontend.observer import Observers
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.layout import DTYPE_BYTES
from engine_svc.messages import CoreHello
from engine_svc.model.build import LoadedModel, ModelOptions, load_model
from engine_svc.model.device import device_of
from engine_svc.model.device_rates import DeviceRates, runtime_bytes
from engine_svc.names import NameMap
from engine_svc.picture import picture
from engine_svc.processes.core_loop import CoreLoop
from engine_svc.processes.links import FrontendLink, LocalPeer
from engine_svc.settings import (
    AUTO,
    MIN_CHUNK,
    EngineSettings,
    SettingInvalid,
    check_quantum,
    step_tokens,
)
from engine_svc.shares import quota_of
from engine_svc.snapshots import CoreSnapshot
from engine_svc.types import EngineLimits
from loraplex.adapter_format import MAX_SAVED_BYTES
from loraplex.base_folder import find_base_folder, read_base_folder
from loraplex.status import FailedPrecondition
from loraplex.tenants import DEFAULT_TENANT

#: Adapters that stay in the arena without a place, so that a turn that comes back needs no copy.
SLOTS_A_PLACE = 4
#: max_loras "auto" on a CPU
CPU_PLACES = 4


class MonotonicClock:
    """engine_svc.core.ports.Clock of this machine."""

    def now(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class CoreParts:
    core: EngineCore
    hello: CoreHello
    snapshot: Callable[[], CoreSnapshot]


def num_places(settings: EngineSettings, device: str) -> int:
    """max_loras in effect. Args: device, the one in use: cpu or cuda."""
    if settings.max_loras != AUTO:
        return settings.max_loras
    places = CPU_PLACES if device == "cpu" else settings.max_num_seqs
    return min(places, settings.max_cpu_loras or places)


def load_engine_model(settings: EngineSettings, host_region: Path) -> LoadedModel:
    """The model of `settings`; slots are filled from `host_region`. Raises: LoraplexError."""
    device = device_of(settings.device).type
    try:
        # before minutes of loading: with device auto nobody knew that it is a GPU
        check_quantum(settings, device)
    except SettingInvalid as error:
        raise FailedPrecondition(str(error), reason="CONFIG_INVALID") from error
    places = num_places(settings, device)
    return load_model(
        find_base_folder(settings.model),
        ModelOptions(
            host_region_path=str(host_region),
            device=settings.device,
            dtype=settings.dtype,
            page_size=settings.page_size,
            arena_bytes=settings.arena_bytes,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_slots=places * SLOTS_A_PLACE,
            max_lora_rank=settings.max_lora_rank,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=step_tokens(settings, device),
            context_tokens=settings.max_model_len,
            enforce_eager=settings.enforce_eager,
            load_format=settings.load_format,
        ),
    )


def metered(model: LoadedModel, rates: DeviceRates) -> FloorMeter:
    """The model's runner, telling the floor of every step."""
    base, item_bytes = model.base, DTYPE_BYTES[model.dtype]
    vocabulary_bytes = base.vocab_size * base.hidden_size * item_bytes
    floor = StepFloor(
        bytes_per_s=rates.bytes_per_s,
        flops_per_s=rates.flops_per_s,
        # a step reads the head, but of the embeddings only its tokens' rows
        weights_bytes=model.weights_bytes - vocabulary_bytes,
        kv_token_bytes=model.layout.page_bytes // model.page_size,
        page_bytes=model.layout.page_bytes,
        flops_a_token=2 * (model.weights_bytes - 2 * vocabulary_bytes) // item_bytes,
        window=base.sliding_window,
    )
    return FloorMeter(model.runner, floor)


def build_core(
    settings: EngineSettings,
    model: LoadedModel,
    weights: WeightsSource,
    runner: Runner | None = None,
) -> CoreParts:
    """The core on its model; `runner` None: the model's own.

    Raises: FailedPrecondition: limits that no engine can keep.
    """
    places = num_places(settings, model.device)
    prefetched, wanted = adapters_ahead(places)
    limits = EngineLimits(
        max_loras=places,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=step_tokens(settings, model.device),
        num_pages=model.num_pages,
        page_size=model.page_size,
        page_bytes=model.layout.page_bytes,
        num_slots=places * SLOTS_A_PLACE,
        context_tokens=model.context_tokens,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        tenant_quota=quota_of(
            settings.tenant_max_queued_requests, settings.tenant_max_queued_tokens
        ),
        max_queue_wait_s=settings.max_queue_wait,
        batch_grant_every=settings.batch_grant_every,
        prefill_price=settings.prefill_price,
        decode_price=settings.decode_price,
        quantum=settings.quantum,
        policy=settings.policy,
        turn_steps=settings.turn_steps,
        turn_max_steps=settings.turn_max_steps,
        closing_steps=settings.closing_steps,
        min_chunk=MIN_CHUNK,
        # on a CPU the next plan has nothing to overlap with
        run_ahead=int(model.device != "cpu"),
        prefix_cache=settings.enable_prefix_caching,
        prefetch_adapters=prefetched,
        max_wanted=wanted,
    )
    try:
        core = EngineCore(
            limits, runner or model.runner, model.slot_writer, weights, MonotonicClock()
        )
    except ValueError as error:
        raise FailedPrecondition(f"settings: {error}", reason="CONFIG_INVALID") from error
    arena_bytes = model.num_pages * model.layout.page_bytes
    known_bytes = model.weights_bytes + model.workspace_bytes + arena_bytes
    in_runtime = runtime_bytes(model.device, known_bytes)

    def snapshot() -> CoreSnapshot:
        return picture(
            core.snapshot(),
            max_loras=places,
            weights_bytes=model.weights_bytes,
            workspace_bytes=model.workspace_bytes,
            runtime_bytes=in_runtime,
            host_cache_bytes=settings.host_cache_bytes,
        )

    hello = CoreHello(os.getpid(), limits, model.dtype, model.page_size, model.weights_bytes)
    return CoreParts(core, hello, snapshot)


class LocalEngine:
    """Model, core and adapter folders in this process; the core's loop runs on a thread."""

    def __init__(
        self, settings: EngineSettings, parts: CoreParts, weights: FolderWeights, text: ModelText
    ) -> None:
        self.base_model = settings.base_model_name
        self._parts = parts
        self.names: NameMap = weights.names
        self._text = text

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(ref.name for ref in self.names.list(DEFAULT_TENANT))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Serving]:
        """What `GenerateCall` needs, while the core's loop runs."""
        link = FrontendLink()
        core_loop = CoreLoop(self._parts.core, self._parts.snapshot)
        to_core = _LocalCore(core_loop, LocalPeer(link, asyncio.get_running_loop()))
        link.names_ready()
        link.connected(None, to_core)
        thread = threading.Thread(target=core_loop.run, name="core-loop", daemon=True)
        thread.start()
        prompts = PromptReader(self._text)
        models = Models(self.base_model, self._text.context_tokens, self.names)
        try:
            yield Serving(link, models, self._text, prompts, Observers(()))
        finally:
            await prompts.close()
            core_loop.stop()
            await asyncio.to_thread(thread.join)


class _LocalCore:
    """The link's way to a core loop in the same process."""

    def __init__(self, core_loop: CoreLoop, peer: LocalPeer) -> None:
        self._core_loop, self._peer = core_loop, peer
        core_loop.attach(peer)

    def put(self, message: object) -> None:
        self._core_loop.post(self._peer, message)

    def is_stalled(self) -> bool:
        return False

    def close(self) -> None:
        self._core_loop.detach(self._peer)


def open_local_engine(
    settings: EngineSettings,
    adapters: Sequence[Path],
    scratch: Path,
    *,
    base_model_aliases: Sequence[str] = (),
    base_model_confirmed: bool = False,
    max_saved_bytes: int = MAX_SAVED_BYTES,
) -> LocalEngine:
    """Load a model and adapter folders, each named by its last part; files go to `scratch`.

    Raises: LoraplexError: the model, or an adapter that publishing would refuse too.
    """
    folder = find_base_folder(settings.model)
    aliases = (settings.model, *base_model_aliases)
    is_dummy = settings.load_format == "dummy"
    facts, _, _ = read_base_folder(
        folder, settings.base_model_name, aliases, dummy_weights=is_dummy
    )
    text = ModelText.load(folder, settings.max_model_len)
    settings = replace(
        settings, host_cache_bytes=bytes_for_folders(settings.host_cache_bytes, adapters)
    )
    region = HostRegion.create(scratch / "host_region", settings.host_cache_bytes)
    model = load_engine_model(settings, region.path)
    weights = FolderWeights(facts, model.layout, region)
    for adapter in adapters:
        weights.add(
            adapter.resolve().name, adapter, max_rank=settings.max_lora_rank,
            base_model_confirmed=base_model_confirmed, max_saved_bytes=max_saved_bytes,
        )  # fmt: skip
    return LocalEngine(settings, build_core(settings, model, weights), weights, text)
