"""Waits against shown bounds, from states as an engine would give them."""

from __future__ import annotations

from benchmarks.fairness.watch import WaitWatch
from loraplex.common.v1 import common_pb2
from loraplex.engine.v1 import engine_pb2


def state(steps: int, position: int, bound_s: float, counter: float) -> engine_pb2.EngineState:
    flow = engine_pb2.FlowState(
        adapter=common_pb2.AdapterIdentity(name="a", digest="sha256:a"),
        ring_position=position,
        wait_bound_s=bound_s,
        virtual_counter=counter,
    )
    return engine_pb2.EngineState(steps=steps, step_s=0.5, flows=[flow])


def watched(*states: engine_pb2.EngineState) -> WaitWatch:
    watch = WaitWatch()
    for number, one in enumerate(states):
        watch.look(one, float(number))
    return watch


def test_a_wait_counts_in_steps_against_the_bound_shown_at_its_first_look() -> None:
    worst = watched(
        state(100, 3, bound_s=20.0, counter=7.0), state(110, 2, 10.0, 7.0), state(130, 1, 5.0, 7.0)
    ).worst["a"]
    assert (worst.waits, worst.steps, worst.seconds) == (1, 30, 2.0)
    assert worst.of_bound == 30 / 40
    assert worst.of_bound_s == 2.0 / 20.0


def test_a_flow_that_is_never_served_exceeds_its_bound() -> None:
    assert watched(state(0, 1, 5.0, 7.0), state(25, 1, 5.0, 7.0)).worst["a"].of_bound == 2.5


def test_who_was_served_or_went_back_to_the_tail_waits_anew() -> None:
    for later in (state(30, 1, 20.0, counter=9.0), state(30, 2, 20.0, 7.0)):
        worst = watched(state(0, 1, 20.0, 7.0), later, state(35, 1, 20.0, 9.0)).worst["a"]
        assert worst.steps <= 5
    served = watched(state(0, 1, 20.0, 7.0), state(20, 0, 0.0, 8.0), state(30, 1, 20.0, 8.0))
    assert (served.worst["a"].waits, served.worst["a"].steps) == (2, 0)


def test_while_no_bound_is_shown_none_is_held() -> None:
    worst = watched(state(0, 1, 20.0, 7.0), state(90, 1, 0.0, 7.0), state(91, 1, 20.0, 7.0))
    assert worst.worst["a"].of_bound == 0.0


def test_before_the_first_step_there_is_no_bound_to_hold() -> None:
    unmeasured = state(0, 1, 0.0, 0.0)
    unmeasured.step_s = 0.0
    assert not watched(unmeasured).worst
