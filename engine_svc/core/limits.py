"""Which limits make an engine that can serve at all."""

from __future__ import annotations

import math
from typing import Protocol

from engine_svc.types import EngineLimits

#: steps of a place between two adapters: one in which it has ended, one that binds the next slot
SWAP_STEPS = 2
#: a turn lasts this many times longer than the swap behind it, so that swaps cost at most 5 %
_TURN_PER_SWAP = 20
POLICIES = ("fair", "resident-first")


def check_limits(limits: EngineLimits) -> None:
    """Raises: ValueError naming the limit, its value and its range."""
    at_least_one = (
        "max_loras", "max_num_seqs", "max_num_batched_tokens", "num_pages", "page_size",
        "page_bytes", "max_queued_requests", "max_queued_tokens", "turn_max_steps", "min_chunk",
        "prefetch_adapters", "max_wanted",
    )  # fmt: skip
    for name in at_least_one:
        if getattr(limits, name) < 1:
            raise ValueError(f"{name} is {getattr(limits, name)}; must be at least 1")
    ranges = (
        ("num_slots", limits.num_slots, limits.max_loras, "max_loras"),
        ("max_num_batched_tokens", limits.max_num_batched_tokens,
         limits.max_num_seqs + limits.min_chunk,
         "max_num_seqs + min_chunk, or decodes fill the steps and no prompt begins"),
        ("batch_grant_every", limits.batch_grant_every, 2, "the other grants are interactive's"),
        ("context_tokens", limits.context_tokens, 2, "a prompt token and an answer"),
        ("turn_steps", limits.turn_steps, 0, "turn_max_steps alone"),
        ("closing_steps", limits.closing_steps, 0, "no soft close"),
    )  # fmt: skip
    for name, value, least, why in ranges:
        if value < least:
            raise ValueError(f"{name} is {value}; must be at least {least} ({why})")
    for name in ("prefill_price", "decode_price", "max_queue_wait_s"):
        number = getattr(limits, name)
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"{name} is {number}; must be a finite number above 0")
    floor = quantum_floor(limits)
    if limits.quantum and limits.quantum < floor:
        raise ValueError(
            f"quantum is {limits.quantum}; must be 0 (auto) or at least {floor}, the service of a "
            "step that one adapter fills"
        )
    if limits.policy not in POLICIES:
        raise ValueError(f"policy is {limits.policy!r}; must be one of {', '.join(POLICIES)}")
    if limits.run_ahead not in (0, 1):
        raise ValueError(f"run_ahead is {limits.run_ahead}; must be 0 or 1")


def adapters_ahead(places: int) -> tuple[int, int]:
    """(prefetch_adapters, max_wanted) of an engine with so many places: a place must not wait for a
    copy when turns are short, nor a copy for the host."""
    return max(2, places // 2), max(16, 2 * places)


def arena_tokens(limits: EngineLimits, adapter_pages: int) -> int:
    """Tokens of one sequence that fit an arena holding nothing but its adapter; its last token
    needs no KV."""
    return (limits.num_pages - adapter_pages) * limits.page_size + 1


class StepSize(Protocol):
    """What bounds a step, as the limits and the settings call it."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def prefill_price(self) -> float: ...
    @property
    def decode_price(self) -> float: ...


def quantum_floor(limits: StepSize) -> int:
    """The service of the largest step that one adapter can have: a smaller quantum would be
    overdrawn by more than the next turn can give back, turn after turn."""
    prompts = limits.prefill_price * limits.max_num_batched_tokens
    decodes = limits.decode_price * limits.max_num_seqs
    return math.ceil(max(prompts, decodes))


def resolved_quantum(limits: EngineLimits) -> int:
    """The configured quantum, or for 0 the least with which swaps cost at most 5 % of the steps of
    a place that has its even part of the seats, all decoding. No more: adapters with many requests
    reach it in few steps, those with one in hundreds, and only so they have the same service."""
    if limits.quantum:
        return limits.quantum
    seats = -(-limits.max_num_seqs // limits.max_loras)
    rare_swaps = _TURN_PER_SWAP * SWAP_STEPS * seats * limits.decode_price
    return max(quantum_floor(limits), math.ceil(rare_swaps))


def longest_turn(limits: EngineLimits) -> int:
    """T: the most steps from the grant of one place to the grant of its next."""
    return limits.turn_max_steps + limits.closing_steps + SWAP_STEPS + limits.run_ahead
