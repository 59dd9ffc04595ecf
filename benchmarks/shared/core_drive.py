"""The engine's core in this process, without frontends: what planning and admission add to a step,
and the throughput that serving over gRPC is held against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine_svc.core.engine import EngineCore
from engine_svc.core.ports import WeightsSource
from engine_svc.model.build import LoadedModel
from engine_svc.types import (
    BASE_DIGEST,
    AdapterRef,
    EngineLimits,
    FlowKey,
    Request,
    RequestEnded,
    SamplingParams,
    ServiceClass,
)

#: as engine_svc.compose has it, which would import the whole frontend
SLOTS_A_PLACE = 4


class MonotonicClock:
    """engine_svc.core.ports.Clock of this machine."""

    def now(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Driven:
    """One load, all of it submitted at once. `tpot_s`: of each step in which all decode."""

    tokens: int
    wall_s: float
    tpot_s: tuple[float, ...]
    plan_s: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


def core_limits(
    model: LoadedModel,
    max_loras: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    prefix_cache: bool = False,
) -> EngineLimits:
    """As the engine has them, with run-ahead wherever it is served."""
    return EngineLimits(
        max_loras=max_loras,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=model.num_pages,
        page_size=model.page_size,
        page_bytes=model.layout.page_bytes,
        num_slots=max_loras * SLOTS_A_PLACE,
        context_tokens=model.context_tokens,
        max_queue_wait_s=86400.0,
        run_ahead=int(model.device != "cpu"),
        prefix_cache=prefix_cache,
        max_wanted=max(16, 2 * max_loras),
        prefetch_adapters=max_loras,
    )


class CoreDriver:
    """One EngineCore over a loaded model; loads run one after the other."""

    def __init__(self, model: LoadedModel, limits: EngineLimits, weights: WeightsSource) -> None:
        self._core = EngineCore(limits, model.runner, model.slot_writer, weights, MonotonicClock())
        self._vocab_size = model.base.vocab_size
        self._number = 0

    def run(self, adapters: Sequence[AdapterRef | None], prompt: int, output: int) -> Driven:
        """One greedy request of `output` tokens for each of `adapters`, None: the base.

        Raises: RuntimeError when one fails.
        """
        began = time.monotonic()
        for ref in adapters:
            self._submit(ref, prompt, output)
        tokens, ended = 0, 0.0
        tpot, plan = [], []
        while self._core.num_live:
            report = self._core.step()
            now = time.monotonic()
            if report.num_tokens == report.num_sequences == len(adapters):
                if ended:
                    tpot.append(now - ended)
                    plan.append(report.plan_s)
                ended = now
            else:
                ended = 0.0
            for item in self._core.take_outputs():
                if isinstance(item, RequestEnded):
                    if item.failure is not None:
                        raise RuntimeError(f"a request failed: {item.failure.message}")
                    tokens += item.stats.completion_tokens
            if report.idle:
                time.sleep(0.0005)
        wall_s = time.monotonic() - began
        while not self._core.step().idle:
            pass
        return Driven(tokens, wall_s, tuple(tpot), tuple(plan))

    def _submit(self, ref: AdapterRef | None, prompt: int, output: int) -> None:
        self._number += 1
        ids = tuple(1 + (self._number + 31 * i) % (self._vocab_size - 1) for i in range(prompt))
        digest = BASE_DIGEST if ref is None else ref.digest
        sampling = SamplingParams(output, seed=self._number, temperature=0.0)
        self._core.submit(
            Request(
                f"bench-{self._number}", FlowKey(ServiceClass.INTERACTIVE, "default", digest),
                ids, sampling, time.monotonic(), ref,
            )
        )  # fmt: skip
