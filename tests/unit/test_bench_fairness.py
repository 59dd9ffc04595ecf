"""The simulator's own parts: costs, baselines, crowd, meter."""

from __future__ import annotations

import pytest

from benchmarks import waits
from benchmarks.fairness.baselines import Fcfs
from benchmarks.fairness.crowd import Cell, Crowd
from benchmarks.fairness.meter import Meter, jain
from benchmarks.fairness.policy import Job, Shape, StepFacts, step_s
from benchmarks.fairness.sim import (
    CAP_ALONE,
    NO_CAP,
    SKIP,
    SLICE,
    TURNS,
    run_closed,
    run_trace,
    wait_bound_steps,
)
from benchmarks.fairness.turns import SimClock, SimRunner
from benchmarks.shared.trace import slora
from engine_svc.core.engine import EngineCore
from engine_svc.core.report import StepReport
from engine_svc.step_chunks import Chunk, Chunks
from engine_svc.types import (
    SamplingParams,
    SeatOpening,
    StepPlan,
)

SHAPE = Shape(max_loras=1, max_num_seqs=4, max_num_batched_tokens=64)


def facts(served: dict[int, int], now_s: float, finished: tuple[Job, ...] = ()) -> StepFacts:
    return StepFacts(served, len(served), 0, 0, finished, now_s)


def run(policy: Fcfs, steps: int) -> list[Job]:
    return [job for _ in range(steps) for job in policy.step().finished]


def test_a_step_costs_what_was_measured() -> None:
    assert step_s(64, 0, 0) == pytest.approx(0.00663)
    assert 0.00573 < step_s(48, 0, 0) < 0.00663
    # sequences, adapters, µs that LoRA takes in each of 32 layers
    for batch, adapters, layer_us in ((1, 1, 2.5), (8, 8, 10.8), (64, 64, 51.4), (256, 22, 58)):
        lora_s = step_s(batch, adapters, 0) - step_s(batch, 0, 0)
        assert lora_s == pytest.approx(32e-6 * layer_us, abs=2.4 * 32e-6)
    # 256 prompts of 512 tokens
    assert 3.07 < step_s(1, 1, 256 * 512) - step_s(1, 1, 0) < 3.4


def test_the_cap_alone_drains_the_busiest_adapter_first_and_costs_no_more_than_a_scheduler() -> (
    None
):
    cell = Cell(1, zipf=True)
    jobs = Crowd(cell).first_jobs_of_the_busiest_first()
    assert sorted(jobs, key=lambda job: job.number) == list(Crowd(cell).first_jobs())
    flows = [job.flow for job in jobs]
    runs = [flow for index, flow in enumerate(flows) if index == 0 or flows[index - 1] != flow]
    work = [sum(job.output for job in jobs if job.flow == flow) for flow in runs[:20]]
    assert work == sorted(work, reverse=True)
    assert len(runs) == len(set(flows)), "an adapter's jobs are apart"
    assert run_trace(NO_CAP, cell) < run_trace(CAP_ALONE, cell) < run_trace(TURNS, cell)


def test_the_skipping_baseline_never_leaves_an_adapter_that_goes_on() -> None:
    policy = Fcfs(SHAPE, swap_s=0.0)
    policy.submit(Job(0, flow=1, prompt=4, output=4))
    policy.submit(Job(1, flow=2, prompt=4, output=4))
    number = 2
    for _ in range(200):
        policy.submit(Job(number, flow=1, prompt=4, output=4))
        number += 1
        assert all(job.flow == 1 for job in policy.step().finished)


def test_a_slice_lets_the_other_adapter_in_once_the_first_has_drained() -> None:
    policy = Fcfs(SHAPE, swap_s=0.0, slice_s=0.05)
    policy.submit(Job(0, flow=2, prompt=4, output=4))
    flows: list[int] = []
    number = 1
    for _ in range(100):
        policy.submit(Job(number, flow=1, prompt=4, output=4))
        number += 1
        flows += [job.flow for job in policy.step().finished]
        if number == 50:
            policy.submit(Job(1000, flow=2, prompt=4, output=4))
    assert flows.count(2) == 2


def test_a_baseline_answers_all_and_counts_each_swap() -> None:
    policy = Fcfs(SHAPE, swap_s=1.0)
    jobs = [Job(number, number % 3, 4, 2) for number in range(9)]
    for job in jobs:
        policy.submit(job)
    swaps, done = 0, list[Job]()
    while len(done) < len(jobs):
        step = policy.step()
        swaps += step.swaps
        done += step.finished
    assert sorted(job.number for job in done) == list(range(9))
    assert swaps == 3
    assert step.now_s > 3.0


def test_crowds_of_equal_seed_are_equal_and_a_guest_never_comes_back_at_once() -> None:
    cell = Cell(1, zipf=True)
    assert cell.demanding == 300
    first, again = (list(Crowd(cell).first_jobs()) for _ in range(2))
    assert first == again
    crowd = Crowd(cell)
    guests = [job for job in crowd.first_jobs() if job.flow not in set(crowd.residents)]
    assert len(guests) == 60
    fresh = [new.flow for job in guests for new in crowd.after(job)]
    assert len(fresh) == 60
    assert not set(fresh) & {job.flow for job in guests}
    (again_asked,) = crowd.after(Job(0, crowd.residents[0], 1, 1))
    assert again_asked.flow == crowd.residents[0]


def test_zipf_gives_the_first_the_most_clients_and_everybody_some() -> None:
    crowd = Crowd(Cell(8, zipf=True))
    jobs = [job.flow for job in crowd.first_jobs()]
    counts = [jobs.count(flow) for flow in crowd.residents[:50]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 10 * counts[-1]
    assert min(map(jobs.count, crowd.residents[-50:])) == 4


def test_a_wait_counts_from_the_arrival_and_between_two_steps_and_when_it_has_not_ended() -> None:
    meter = Meter(max_num_seqs=2)
    a, b = Job(0, 1, 1, 1), Job(1, 2, 1, 1)
    meter.submitted(a)
    meter.submitted(b)
    meter.stepped(facts({1: 2}, 1.0))
    meter.stepped(facts({}, 1.5))
    meter.stepped(facts({1: 2}, 2.0))
    meter.stepped(facts({2: 2}, 3.0))
    meter.stepped(facts({1: 2}, 4.0, (a,)))
    found = meter.measured([1, 2])
    assert found.steps == 4
    # flow 1 waited 0 and 1 steps, flow 2 waited 2 and, not ended, 1
    assert (found.longest_waits[0], found.worst_wait_steps) == (1, 2)
    assert found.worst_wait_s == 2.0


def test_what_is_computed_again_after_a_preemption_is_no_service() -> None:
    runner = SimRunner(SimClock())
    runner.know(Job(7, flow=3, prompt=4, output=9))
    opening = SeatOpening(0, SamplingParams(9, seed=7), 0, (1,) * 4, ())

    def served(start: int, num_tokens: int, *openings: SeatOpening) -> dict[int, int]:
        named = (1,) * num_tokens if start == 0 else ()
        chunk = Chunk(0, 0, start, num_tokens, named, (0,), (0,))
        runner.forward(StepPlan(0, Chunks.of((chunk,)), openings, (), (), 0))
        return runner.facts.served

    assert served(0, 4, opening) == {3: 4}
    assert served(4, 1) == {3: 2}
    # paused, its pages lost: five known tokens and the one sampled last, then it goes on
    assert served(0, 6, opening) == {3: 2}
    assert runner.facts.pauses == 1
    assert served(6, 1) == {3: 2}


def test_jain_is_one_for_equals_and_one_of_n_for_a_single_taker() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_the_real_core_serves_all_and_keeps_its_bound_where_the_baselines_starve() -> None:
    cell = Cell(1, zipf=False)
    ours, skip, sliced = (run_closed(name, cell, 9000) for name in (TURNS, SKIP, SLICE))
    assert ours.worst_wait_steps <= wait_bound_steps(cell)
    assert skip.worst_wait_steps == 9000
    assert ours.jain > 0.9 > sliced.jain > skip.jain
    assert run_trace(TURNS, cell) > 0


def test_a_served_load_ends_whichever_way_turns_do_and_short_ones_answer_sooner() -> None:
    load = waits.Load(
        rate=30.0, seconds=3.0, adapters=60, places=4, seats=32, step_tokens=256, pages=6000
    )
    found = {name: waits.run(load, way) for name, way in waits.WAYS.items()}
    assert {len(one.ttft_s) for one in found.values()} == {len(found[waits.FIRST].whole_s)}
    assert found[waits.FIRST].ttft_s[-1] < found[waits.LONG].ttft_s[-1]
    assert all(one.finished_per_s > 0 and one.again == 0 for one in found.values())


def test_what_a_served_load_computes_again_is_all_that_it_computes_beyond_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of many chunks, and pages for few sequences."""
    step, tokens = EngineCore.step, [0]

    def counted(core: EngineCore) -> StepReport:
        report = step(core)
        tokens[0] += report.num_tokens if report.step >= 0 else 0
        return report

    monkeypatch.setattr(EngineCore, "step", counted)
    load = waits.Load(
        rate=30.0, seconds=1.0, adapters=60, places=4, seats=32, step_tokens=48, pages=500
    )
    found = waits.run(load, waits.WAYS[waits.FIRST])
    requests = slora([str(n) for n in range(60)], load.rate, load.seconds, waits.SEED)
    once = sum(one.prompt_tokens + one.output_tokens - 1 for one in requests)
    assert found.again == tokens[0] - once > 0


def test_the_served_load_costs_what_steps_were_measured_to_cost() -> None:
    assert waits.step_s(64, 0, 0) == pytest.approx(6.17e-3)
    assert waits.step_s(96, 8, 100) == pytest.approx((7.015 + 8 * 0.0225 + 2.5) / 1e3)
    assert waits.step_s(512, 0, 0) == pytest.approx((11.68 + 2 * (11.68 - 7.86)) / 1e3)
