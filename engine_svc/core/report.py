"""What one step did, for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.waits import Cause


@dataclass(frozen=True, slots=True)
class StepReport:
    """One call of EngineCore.step. `step` −1: nothing was launched."""

    step: int
    num_tokens: int
    num_sequences: int
    #: sequences ÷ max_num_seqs
    fill: float
    num_adapters: int
    #: tokens of each adapter in the step, the base last
    segments: tuple[int, ...]
    plan_s: float
    #: of the step that this call committed; 0 = none
    compute_s: float
    commit_s: float
    #: sequences that wait, by what their adapter lacks; only causes that somebody waits for
    deferred: tuple[tuple[Cause, int], ...]
    waiting: int
    running: int
    #: nothing was launched and nothing committed: wait for a message or a load before stepping
    idle: bool
