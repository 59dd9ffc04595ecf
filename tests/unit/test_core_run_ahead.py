"""Run-ahead: the next step is planned and launched while the one before it still runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_svc import compose
from engine_svc.settings import EngineSettings
from engine_svc.types import FinishReason
from tests.support.core_world import Heard, World, adapter, limits


def noted_calls(world: World) -> list[tuple[str, int]]:
    """The runner's verbs with their steps, in the order in which the core calls them."""
    calls: list[tuple[str, int]] = []

    def note(verb: str) -> None:
        real = getattr(world.runner, verb)

        def noted(what: Any, *rest: Any) -> Any:
            calls.append((verb, what if isinstance(what, int) else what.step))
            return real(what, *rest)

        setattr(world.runner, verb, noted)

    for verb in ("forward", "sample", "collect"):
        note(verb)
    return calls


def test_a_step_is_launched_before_the_one_ahead_of_it_is_collected() -> None:
    world = World(limits(run_ahead=1))
    calls = noted_calls(world)
    world.submit(4, max_tokens=5)
    world.run()
    launches = [[("forward", step), ("sample", step)] for step in range(5)]
    collects = [[("collect", step)] for step in range(5)]
    expected = launches[0]
    for step in range(1, 5):
        expected = expected + launches[step] + collects[step - 1]
    assert calls == expected + collects[4]
    assert [plan.run_ahead for plan in world.runner.plans] == [0, 1, 1, 1, 1]


def test_without_run_ahead_each_step_is_collected_before_the_next_is_planned() -> None:
    world = World(limits(run_ahead=0))
    calls = noted_calls(world)
    world.submit(4, max_tokens=3)
    world.run()
    verbs = ("forward", "sample", "collect")
    assert calls == [(verb, step) for step in range(3) for verb in verbs]


def discarded(heard: Heard) -> int:
    assert heard.ended is not None
    return heard.ended.stats.discarded_tokens


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_an_end_discards_at_most_the_one_token_that_runs_ahead(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead, context_tokens=200, num_pages=200))
    by_length = world.submit(4, max_tokens=6)
    expected, _, _ = world.expected(world.submit(5, max_tokens=30).request, 0)
    by_stop = world.submit((5, 6, 7, 8), max_tokens=30, eos_token_ids=tuple(range(0, 40, 3)))
    cut, cancelled = world.submit(6, adapter("a"), max_tokens=30), world.submit(7, max_tokens=30)
    while len(cut.tokens.get(0, ())) < 4 or len(cancelled.tokens.get(0, ())) < 4:
        world.step()
    world.cut(cut, 0, len(cut.tokens[0]))
    world.cancel(cancelled.request.request_id)
    world.run()
    assert len(expected) == 30
    assert by_length.reasons[0] is FinishReason.LENGTH
    assert discarded(by_length) == 0
    assert by_stop.reasons[0] is FinishReason.STOP
    for heard in (by_stop, cut, cancelled):
        assert discarded(heard) == run_ahead


@pytest.mark.parametrize(("device", "run_ahead"), [("cpu", 0), ("cuda", 1)])
def test_a_gpu_runs_ahead_and_a_cpu_does_not(
    device: str, run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compose, "runtime_bytes", lambda device, known_bytes: 0)
    model = SimpleNamespace(
        device=device, dtype="float32", num_pages=64, page_size=16, context_tokens=256,
        layout=SimpleNamespace(page_bytes=4096), weights_bytes=0, workspace_bytes=0,
        runner=None, slot_writer=None,
    )  # fmt: skip
    parts = compose.build_core(EngineSettings(model="m"), model, None)  # type: ignore[arg-type]
    assert parts.hello.limits.run_ahead == run_ahead
