"""How long the core thinks: the time to plan a step, with everything around it simulated."""

from __future__ import annotations

import time

from benchmarks.fairness_engine import SimClock, Turns, limits_of
from benchmarks.fairness_policy import Job, Shape

NUM_SEQUENCES = 256
NUM_FLOWS = 10_000
MAX_LORAS = 32
STEPS = 1000


class WallClock(SimClock):
    """Simulated seconds and, on top, those that really pass: the core reads its own time."""

    def now(self) -> float:
        return self.now_s + time.perf_counter()


def plan_times_us(steps: int = STEPS) -> list[float]:
    """µs of each plan with NUM_SEQUENCES in it, while NUM_FLOWS adapters ask without end."""
    shape = Shape(MAX_LORAS, NUM_SEQUENCES, 2 * NUM_SEQUENCES)
    limits = limits_of(shape, quantum=0, turn_max_steps=512)
    turns = Turns(limits, WallClock())
    number = 0
    for _ in range(NUM_SEQUENCES // MAX_LORAS):
        for flow in range(NUM_FLOWS):
            turns.submit(_job(number, flow))
            number += 1
    times: list[float] = []
    for _ in range(20 * steps):
        if len(times) == steps:
            break
        report = turns.core.step()
        if report.num_sequences == NUM_SEQUENCES:
            times.append(1e6 * report.plan_s)
        for job in turns.finished():
            turns.submit(_job(number, job.flow))
            number += 1
    return times


def _job(number: int, flow: int) -> Job:
    return Job(number, flow, prompt=8, output=16 + number % 48)
