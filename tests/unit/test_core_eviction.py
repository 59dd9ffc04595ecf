"""Which slots are given up, and that places do not wait for copies that could have begun."""

from __future__ import annotations

from tests.support.core_world import World, adapter, limits


def test_an_adapter_with_the_longest_backlog_does_not_get_its_place_back_at_once() -> None:
    """Two slots, one place: its sequences are the oldest all the time, and its slot is given up
    all the same."""
    world = World(limits(max_loras=1, num_slots=2, num_pages=2000, quantum=16, context_tokens=200))
    for _ in range(60):
        world.submit(3, adapter("long"), max_tokens=40)
    for name in "bcdef":
        for _ in range(6):
            world.submit(3, adapter(name), max_tokens=40)
    bound = [p.slot_bindings for p in world.runner.plans]
    while len(bound) < 200:
        world.step()
        bound = [p.slot_bindings for p in world.runner.plans]
    turns = [b.digest for bindings in bound for b in bindings]
    rounds = [turns[i : i + 6] for i in range(0, len(turns) - 5, 6)]
    assert len(rounds) >= 3
    assert all(len(set(one)) == 6 for one in rounds)


def test_the_next_ones_copies_take_pages_of_paused_sequences_before_places_are_free() -> None:
    world = World(
        limits(max_loras=6, num_slots=24, num_pages=96, quantum=48, prefetch_adapters=6,
               max_num_seqs=12, max_num_batched_tokens=48, closing_steps=1, turn_max_steps=3,
               prefix_cache=False)
    )  # fmt: skip
    world.writer.delay = lambda: 1
    for _ in range(2):
        for name in "abcdefghijkl":
            world.submit(8, adapter(name), max_tokens=40)
    num_steps = idle = 0
    while world.core.num_live == 24:
        world.step()
        num_steps += 1
        if num_steps > 20:
            idle += 6 - world.runner.plans[-1].num_adapters
    assert num_steps > 50
    assert world.core.snapshot().preemptions > 0
    assert idle <= 0.01 * 6 * num_steps


def test_a_turn_that_lacks_only_tokens_keeps_its_place() -> None:
    """Two adapters with places, prompts that fill every step: neither is sent to the ring's tail
    because the other has the step's tokens."""
    world = World(
        limits(max_loras=2, num_pages=2000, context_tokens=200, quantum=1000, turn_max_steps=1000,
               max_num_seqs=4, max_num_batched_tokens=8)
    )  # fmt: skip
    for _ in range(20):
        for name in "ab":
            world.submit(16, adapter(name), max_tokens=1)
    world.run()
    assert world.core._books.turns.num_begun == 2
