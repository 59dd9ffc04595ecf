"""Waits of a running engine, seen from outside: every look at GetEngineState against its bounds.

A flow that stands in the ring shows a bound: the most steps until something of it is planned,
whatever else happens. From the first look at such a wait on, the engine's own count of steps says
how much of the bound is used; no clock, and no other work on the machine, makes a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.engine.v1 import engine_pb2

Flow = tuple[int, str, str]


@dataclass(slots=True)
class _Wait:
    """One stay in the ring; it is over when the flow was served, which its counter tells."""

    counter: float
    position: int
    first_step: int
    bound_steps: float
    bound_s: float
    began_s: float


@dataclass(slots=True)
class Worst:
    """The longest wait of one adapter."""

    steps: int = 0
    seconds: float = 0.0
    #: steps of a wait / the bound shown at its first look, and the same in seconds
    of_bound: float = 0.0
    of_bound_s: float = 0.0
    waits: int = 0


class WaitWatch:
    """`look` at states in the order in which the engine gave them."""

    def __init__(self) -> None:
        self._waits: dict[Flow, _Wait] = {}
        self.worst: dict[str, Worst] = {}

    def look(self, state: engine_pb2.EngineState, now_s: float) -> None:
        """`now_s`: any clock, for the waits in seconds."""
        if not state.step_s:
            return
        for flow in state.flows:
            key = (flow.service_class, flow.tenant, flow.adapter.digest)
            worst = self.worst.setdefault(flow.adapter.name, Worst())
            if flow.ring_position <= 0 or not flow.wait_bound_s:
                # it has a place, its weights are on their way, or no bound holds now: pages lack
                self._waits.pop(key, None)
                continue
            wait = self._waits.get(key)
            if wait is None or _is_another(wait, flow):
                self._waits[key] = _begin(flow, state, now_s)
                worst.waits += 1
                continue
            wait.position = flow.ring_position
            steps, seconds = state.steps - wait.first_step, now_s - wait.began_s
            worst.steps = max(worst.steps, steps)
            worst.seconds = max(worst.seconds, seconds)
            worst.of_bound = max(worst.of_bound, steps / wait.bound_steps)
            worst.of_bound_s = max(worst.of_bound_s, seconds / wait.bound_s)


def _is_another(wait: _Wait, flow: engine_pb2.FlowState) -> bool:
    """It was served since the last look, or went back to the tail."""
    return flow.virtual_counter != wait.counter or flow.ring_position > wait.position


def _begin(flow: engine_pb2.FlowState, state: engine_pb2.EngineState, now_s: float) -> _Wait:
    return _Wait(
        counter=flow.virtual_counter,
        position=flow.ring_position,
        first_step=state.steps,
        bound_steps=flow.wait_bound_s / state.step_s,
        bound_s=flow.wait_bound_s,
        began_s=now_s,
    )
