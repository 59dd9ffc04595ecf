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


def test_the_next_ones_copy_takes_pages_of_paused_sequences_before_the_turn_ends() -> None:
    world = World(
        limits(max_loras=2, num_slots=8, num_pages=48, quantum=16, prefetch_adapters=2,
               closing_steps=3, turn_max_steps=6, context_tokens=60, prefix_cache=False),
        adapter_pages=2,
    )  # fmt: skip
    for _ in range(2):
        for name in "abcdef":
            world.submit(8, adapter(name), max_tokens=40)
    idle = 0
    for number in range(150):
        world.step()
        if number > 20 and world.core.num_live == 12:
            idle += 2 - len({c.slot for c in world.runner.plans[-1].chunks})
    assert world.core.snapshot().preemptions > 0
    assert idle <= 10


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
