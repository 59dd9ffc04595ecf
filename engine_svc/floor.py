"""The least time that a step can take on its device, and a Runner that tells it of every step.

Floor ÷ measured time is the useful share of the GPU: it falls when kernels are many and small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine_svc.core.ports import Runner
from engine_svc.types import NO_SLOT, LateInputs, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Bytes that must be read over the bandwidth, or products over their rate: the longer one.

    `weights_bytes` are those of every step; `flops_a_token` those of the layers' linears; `window`
    positions that one sees, its own included, 0 = all.
    """

    bytes_per_s: float
    flops_per_s: float
    weights_bytes: int
    kv_token_bytes: int
    page_bytes: int
    flops_a_token: int
    window: int = 0

    def seconds(self, num_tokens: int, context_tokens: int, adapter_pages: int) -> float:
        """Args: context_tokens, keys and values that the step's sequences read and write;
        adapter_pages, of each distinct adapter once."""
        num_bytes = (
            self.weights_bytes
            + context_tokens * self.kv_token_bytes
            + adapter_pages * self.page_bytes
        )
        return max(num_bytes / self.bytes_per_s, num_tokens * self.flops_a_token / self.flops_per_s)


class FloorMeter:
    """engine_svc.core.ports.Runner around another one; `observe` gets each step's floor."""

    def __init__(
        self, runner: Runner, floor: StepFloor, observe: Callable[[float], None] = lambda s: None
    ) -> None:
        self._runner, self._floor, self.observe = runner, floor, observe
        #: pages of the adapter in each slot
        self._pages: dict[int, int] = {}

    def forward(self, plan: StepPlan) -> None:
        self._runner.forward(plan)

    def sample(self, plan: StepPlan, late: LateInputs) -> None:
        """Counts once the device has its work."""
        self._runner.sample(plan, late)
        for binding in plan.slot_bindings:
            self._pages[binding.slot] = len(binding.page_ids)
        if plan.chunks:
            chunks, num_tokens = plan.chunks, plan.num_tokens
            context = sum(chunks.offsets) + len(chunks) * chunks.origin + num_tokens
            if self._floor.window:
                most = self._floor.window - 1 - chunks.origin
                context -= sum([offset - most for offset in chunks.offsets if offset > most])
            slots = set(chunks.slots) - {NO_SLOT}
            pages = sum([self._pages[slot] for slot in slots])
            self.observe(self._floor.seconds(num_tokens, context, pages))

    def collect(self, step: int) -> StepResult:
        return self._runner.collect(step)
