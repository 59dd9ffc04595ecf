"""12 adapters, two places, more demand than places: what GetEngineState promises, it keeps.

Waits are counted in the engine's own steps, so other work on the machine changes nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from benchmarks.fairness.watch import WaitWatch
from tests.support.crowd import Crowd, crowd
from tests.support.engine_stack import Stack
from tests.support.waiting import eventually

ADAPTERS = tuple(f"a{index:02}" for index in range(12))
MAX_LORAS, SEATS = 2, 8
ENGINE_ARGS = (
    "--max-loras", str(MAX_LORAS), "--max-num-seqs", str(SEATS), "--max-num-batched-tokens", "32",
    "--turn-max-steps", "12", "--closing-steps", "2", "--max-queue-wait", "600",
)  # fmt: skip
MAX_TOKENS = (23, 31, 41)
#: the first two adapters have more clients than there are seats: they never lack a request
RESIDENT_TOKENS = (97, 131, 173, 97, 131, 173)
ROUNDS = 4


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Without an engine."""
    with Stack(tmp_path_factory.mktemp("fair-waits")) as stack:
        stack.start_registry()
        stack.add_base_model()
        for seed, name in enumerate(ADAPTERS, start=1):
            stack.publish(name, seed)
        yield stack


@contextlib.contextmanager
def crowded_engine(stack: Stack, *args: str) -> Iterator[Crowd]:
    """Two adapters are there before the others."""
    stack.start_engine(*ENGINE_ARGS, *args)
    try:
        with crowd(stack) as people:
            for name in ADAPTERS[:MAX_LORAS]:
                start_clients(people, name, RESIDENT_TOKENS)
            # they hold both places and all seats; some of them wait for seats already
            eventually(lambda: stack.state().running_sequences == SEATS, 60)
            for name in ADAPTERS[MAX_LORAS:]:
                start_clients(people, name, MAX_TOKENS)
            yield people
        assert not people.errors
    finally:
        stack.stop_engine()


def start_clients(people: Crowd, name: str, lengths: tuple[int, ...]) -> None:
    for max_tokens in lengths:
        people.start(name, max_tokens=max_tokens)


def look_until(stack: Stack, watch: WaitWatch, waits: int, of_bound: float) -> None:
    """Until every adapter has waited so often, or somebody for so much of its bound."""

    def enough() -> bool:
        watch.look(stack.state(), time.monotonic())
        worst = watch.worst.values()
        often = len(worst) == len(ADAPTERS) and min(one.waits for one in worst) >= waits
        return often or max((one.of_bound for one in worst), default=0.0) > of_bound

    eventually(enough, 120)


def test_every_adapter_is_planned_within_the_steps_that_its_bound_shows(stack: Stack) -> None:
    watch = WaitWatch()
    with crowded_engine(stack):
        look_until(stack, watch, ROUNDS, of_bound=1.0)
    # each was served between its waits, and did wait, or this would show nothing
    assert min(watch.worst[name].waits for name in ADAPTERS) >= ROUNDS
    assert min(one.steps for one in watch.worst.values()) > 0
    assert max(one.of_bound for one in watch.worst.values()) <= 1.0, watch.worst


def test_the_residents_of_the_fields_policy_let_the_others_wait_for_twice_that_bound(
    stack: Stack,
) -> None:
    watch = WaitWatch()
    with crowded_engine(stack, "--policy", "resident-first") as people:
        look_until(stack, watch, ROUNDS, of_bound=2.0)
        assert set(people.tokens) <= set(ADAPTERS[:MAX_LORAS])
    # they show the bound of turns, which this policy does not take
    assert max(watch.worst[name].of_bound for name in ADAPTERS[MAX_LORAS:]) > 2.0
