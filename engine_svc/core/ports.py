"""What the core needs from others: four Protocols, implemented elsewhere and joined in the
composition root.

The core calls; nobody calls back. Everything that happens elsewhere is fetched by `poll` at the
start of a step.
"""

from __future__ import annotations

from typing import Protocol

from engine_svc.types import (
    AdapterRef,
    Failure,
    LateInputs,
    SlotLoad,
    StepPlan,
    StepResult,
    WeightsFailed,
    WeightsReady,
)


class Clock(Protocol):
    def now(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        ...


class Runner(Protocol):
    """Executes plans in the order of `forward` calls, at most run_ahead + 1 of them in flight."""

    def forward(self, plan: StepPlan) -> None:
        """Start the trunk of a step: bindings, page copies, seat openings, then all chunks' hidden
        states."""
        ...

    def sample(self, plan: StepPlan, late: LateInputs) -> None:
        """Start heads, penalties, masks and the sampler for the step that was forwarded last."""
        ...

    def collect(self, step: int) -> StepResult:
        """Wait for a step's tokens. Steps are collected in order, each once."""
        ...


class SlotWriter(Protocol):
    """Copies packed adapters from the host cache into *filling* pages beside the steps."""

    def start(self, load: SlotLoad) -> None:
        """Begin a copy. The pages belong to the writer until `poll` names the slot. Never
        blocks."""
        ...

    def poll(self) -> tuple[tuple[SlotLoad, Failure | None], ...]:
        """Loads that ended since the last call; None = the bytes are there."""
        ...


class WeightsSource(Protocol):
    """Brings packed adapters into the host cache: local, or the loader process behind a socket.
    Never blocks."""

    def want(self, ref: AdapterRef, rank: int) -> None:
        """Ask for an adapter; `rank` is its place in the order of coming turns, 0 first. Repeating
        updates the rank."""
        ...

    def drop(self, digest: str) -> None:
        """The span of a WeightsReady is no longer read; the host cache may evict it."""
        ...

    def poll(self) -> tuple[WeightsReady | WeightsFailed, ...]:
        """Answers since the last call: exactly one for each `want` that had none outstanding."""
        ...
