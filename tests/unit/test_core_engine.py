"""The core serves requests: tokens, ends, forks, cancels; with and without run-ahead."""

from __future__ import annotations

import pytest

from engine_svc.core import failures
from engine_svc.types import Failure, FinishReason
from tests.support.core_world import Heard, World, adapter, limits

AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])


def answer_of(world: World, heard: Heard, choice: int = 0) -> list[int]:
    """All tokens that the fake model gives, stops aside."""
    return world.expected(heard.request, choice)[0]


@AHEAD
def test_a_request_to_the_base_gets_its_tokens(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead))
    heard = world.submit(10, max_tokens=5)
    world.run()
    assert len(heard.tokens[0]) == 5
    assert heard.reasons == {0: FinishReason.LENGTH}
    assert world.weights.wants == []


@AHEAD
def test_three_adapters_and_the_base_rotate_through_two_places(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead))
    for ref in (adapter("a"), adapter("b"), adapter("c"), None):
        for _ in range(3):
            world.submit(6, ref, max_tokens=20)
    world.run()
    assert all(h.ended and h.ended.failure is None for h in world.heard.values())
    assert max(plan.num_adapters for plan in world.runner.plans) == 2
    assert sum(h.ended.stats.paused_s for h in world.heard.values() if h.ended) > 0


@AHEAD
def test_adapters_that_fit_their_places_never_pause(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead, num_pages=200))
    for ref in (adapter("a"), adapter("b"), None, adapter("a")):
        world.submit(6, ref, max_tokens=30)
    world.run()
    assert all(h.ended and h.ended.stats.paused_s == 0 for h in world.heard.values())


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    world = World(limits(max_num_batched_tokens=8))
    world.submit(3, max_tokens=20)
    world.step()
    world.submit(30, max_tokens=2)
    world.run()
    sizes = [[c.num_tokens for c in plan.chunks] for plan in world.runner.plans]
    assert [1, 7] in sizes, sizes
    assert all(sum(step) <= 8 for step in sizes)


@AHEAD
def test_a_stop_token_ends_the_choice_and_is_named(run_ahead: int) -> None:
    probe = World(limits())
    tokens = answer_of(probe, probe.submit(5, max_tokens=10))
    stop = tokens[3]
    world = World(limits(run_ahead=run_ahead))
    heard = world.submit(5, max_tokens=10, eos_token_ids=(stop,))
    world.run()
    cut = tokens.index(stop) + 1
    assert heard.tokens[0] == tokens[:cut]
    assert (heard.reasons[0], heard.stop_ids[0]) == (FinishReason.STOP, stop)
    assert heard.ended is not None
    # the step that was launched before the stop was known has sampled one token too many
    assert heard.ended.stats.discarded_tokens == run_ahead


def test_no_token_stops_within_min_tokens() -> None:
    probe = World(limits())
    tokens = answer_of(probe, probe.submit(5, max_tokens=10))
    world = World(limits())
    heard = world.submit(
        5, max_tokens=10, min_tokens=2, stop_token_ids=(tokens[0], tokens[1], tokens[4])
    )
    world.run()
    assert heard.tokens[0][:2] == tokens[:2]
    assert heard.reasons[0] is FinishReason.STOP
    assert len(heard.tokens[0]) > 2


@AHEAD
def test_a_full_context_ends_the_choice_by_length(run_ahead: int) -> None:
    world = World(limits(context_tokens=16, run_ahead=run_ahead))
    heard = world.submit(13, max_tokens=50)
    world.run()
    assert len(heard.tokens[0]) == 3
    assert heard.reasons[0] is FinishReason.LENGTH


@AHEAD
@pytest.mark.parametrize("prompt", [8, 9, 11])
def test_choices_share_the_prompts_full_pages_and_copy_the_partial_one(
    run_ahead: int, prompt: int
) -> None:
    world = World(limits(run_ahead=run_ahead))
    heard = world.submit(prompt, adapter("a"), max_tokens=6, n=3)
    world.run()
    assert len({tuple(tokens) for tokens in heard.tokens.values()}) == 3
    copies = [copy for plan in world.runner.plans for copy in plan.page_copies]
    assert len(copies) == (0 if prompt % 4 == 0 else 2)
    last = [c for c in world.runner.plans[-1].chunks]
    shared = {c.page_ids[: prompt // 4] for c in last}
    assert len(last) == 3
    assert len(shared) == 1
    # the prompt was computed once
    computed = sum(c.num_tokens for plan in world.runner.plans for c in plan.chunks if c.token_ids)
    assert computed == prompt


def test_a_choice_that_the_frontend_stops_gives_its_rest_back() -> None:
    world = World(limits())
    heard = world.submit(5, max_tokens=40, n=2)
    for _ in range(6):
        world.step()
    heard_tokens = len(heard.tokens[0])
    world.cut(heard, 0, 2)
    world.run()
    assert heard.ended is not None
    assert heard.ended.failure is None
    assert heard.ended.stats.completion_tokens == 2 + 40
    assert heard.ended.stats.discarded_tokens == heard_tokens - 2


@AHEAD
def test_a_cancelled_request_gives_everything_back_within_two_steps(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead, prefix_cache=False))
    heard = world.submit(9, adapter("a"), max_tokens=40, n=2)
    for _ in range(8):
        world.step()
    assert world.core.snapshot().kv_pages > 0
    launched = len(world.runner.plans)
    world.cancel(heard.request.request_id)
    assert heard.ended is not None
    assert heard.ended.failure is not None
    assert heard.ended.failure.reason == "CANCELLED"
    for _ in range(2):
        world.step()
    assert len(world.runner.plans) == launched, "it entered a later plan"
    assert world.core.snapshot().kv_pages == 0


def test_a_failure_that_comes_with_a_cancel_is_the_requests_own() -> None:
    world = World(limits())
    heard = world.submit(9)
    failure = Failure("RESOURCE_EXHAUSTED", "READER_TOO_SLOW", "too slow")
    world.core.cancel(heard.request.request_id, failure)
    world.run()
    assert heard.ended is not None
    assert heard.ended.failure == failure


@AHEAD
def test_a_deadline_ends_running_and_waiting_requests(run_ahead: int) -> None:
    world = World(limits(max_num_seqs=1, run_ahead=run_ahead))
    until = world.clock.now() + 0.1
    both = [world.submit(5, max_tokens=59, deadline_s=until) for _ in range(2)]
    world.run(30)
    for heard in both:
        assert heard.ended is not None
        assert heard.ended.failure is not None
        assert heard.ended.failure.reason == "DEADLINE_EXCEEDED"
    assert 0 < len(both[0].tokens[0]) < 59
    assert not both[1].tokens


def test_deadlines_of_requests_that_ended_are_forgotten() -> None:
    world = World(limits())
    kept = world.submit(5, max_tokens=59, deadline_s=world.clock.now() + 0.1)
    for _ in range(500):
        gone = world.submit(5, deadline_s=1e6)
        world.core.cancel(gone.request.request_id)
        world._listen()
    assert len(world.core._deadlines) < 100
    world.run(30)
    assert kept.ended is not None
    assert kept.ended.failure is not None
    assert kept.ended.failure.reason == "DEADLINE_EXCEEDED"


@AHEAD
def test_non_finite_logits_fail_only_their_own_request(run_ahead: int) -> None:
    world = World(limits(run_ahead=run_ahead))
    world.runner.not_finite = {"sha256:bad"}
    bad, good = world.submit(5, adapter("bad")), world.submit(5, adapter("good"))
    world.run()
    assert bad.ended is not None
    assert bad.ended.failure is not None
    failure = bad.ended.failure
    assert (failure.code, failure.reason) == ("FAILED_PRECONDITION", "WEIGHTS_NOT_FINITE")
    assert "bad@1 (sha256:bad) produced non-finite logits" in failure.message
    assert good.ended is not None
    assert good.ended.failure is None


def test_non_finite_logits_of_the_base_model_are_the_engines_own_failure() -> None:
    failure = failures.not_finite("r1", None)
    assert (failure.code, failure.reason) == ("INTERNAL", "INVARIANT")
    assert "the base model produced non-finite logits" in failure.message


@AHEAD
def test_prompt_logprobs_cover_each_prompt_token_after_the_first_once(run_ahead: int) -> None:
    world = World(limits(max_num_batched_tokens=6, run_ahead=run_ahead))
    heard = world.submit(20, max_tokens=2, prompt_logprobs=3, n=2)
    world.run()
    assert heard.ended is not None
    rows = heard.ended.prompt_logprobs
    assert [row.token_id for row in rows] == list(heard.request.prompt_token_ids[1:])
    assert [row.logprob for row in rows] == [-float(i) for i in range(19)]


def test_a_draining_core_finishes_what_it_admitted_and_refuses_the_rest() -> None:
    world = World(limits())
    first = world.submit(5, adapter("a"))
    world.core.drain()
    second = world.submit(5)
    world.run()
    assert first.ended is not None
    assert first.ended.failure is None
    assert second.ended is not None
    assert second.ended.failure is not None
    assert second.ended.failure.reason == "DRAINING"
    assert not second.admitted


def test_a_request_id_that_is_in_use_is_an_error_of_the_caller() -> None:
    world = World(limits())
    heard = world.submit(5)
    with pytest.raises(ValueError, match="r0 is in use"):
        world.core.submit(heard.request)
    world.run()


def test_a_step_without_work_is_idle_and_launches_nothing() -> None:
    world = World(limits())
    report = world.step()
    assert report.idle
    assert report.step == -1
    assert world.runner.plans == []


def test_a_step_report_counts_what_the_step_did() -> None:
    world = World(limits(max_num_seqs=4, max_loras=1))
    world.submit(3, adapter("a"), max_tokens=8)
    world.submit(4, max_tokens=8)
    world.submit(4, adapter("b"), max_tokens=8)
    busy = next(r for r in (world.step() for _ in range(6)) if r.num_adapters == 1)
    assert busy.num_tokens == sum(busy.segments)
    assert busy.fill == busy.num_sequences / 4
    assert sum(count for _, count in busy.deferred) == busy.waiting
    world.run()


def test_a_snapshot_shows_flows_residency_and_how_the_arena_is_split() -> None:
    world = World(limits(max_loras=1, num_pages=64, quantum=500, turn_max_steps=500))
    world.submit(9, adapter("a"), max_tokens=30, tenant="t")
    world.submit(5, max_tokens=30, tenant="u")
    for _ in range(4):
        world.step()
    world.submit(5, adapter("b"), max_tokens=4, tenant="t")
    world.step()
    world.weights.delay = lambda: 50
    world.submit(5, adapter("c"), max_tokens=4, tenant="t")
    for _ in range(3):
        world.step()
    snapshot = world.core.snapshot()
    flows = {(f.flow.tenant, f.adapter.name if f.adapter else ""): f for f in snapshot.flows}
    assert flows["t", "a"].running == flows["u", ""].running == 1
    assert flows["t", "a"].ring_position == 0
    assert (flows["t", "b"].waiting, flows["t", "b"].ring_position) == (1, 1)
    assert (flows["t", "c"].waiting, flows["t", "c"].ring_position) == (1, -1)
    assert flows["t", "b"].waited_s > 0
    resident = {(r.adapter.name, r.tier, r.holds_place) for r in snapshot.residents}
    assert resident == {("a", "slot", True), ("b", "slot", False)}
    parts = snapshot.kv_pages + snapshot.cached_pages + snapshot.adapter_pages
    assert parts + snapshot.free_pages == snapshot.num_pages == 64
    assert snapshot.adapter_pages == 4
    assert snapshot.loading_adapters == 1
    world.run()
