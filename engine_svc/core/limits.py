"""Which limits make an engine that can serve at all."""

from __future__ import annotations

from engine_svc.types import EngineLimits


def check_limits(limits: EngineLimits) -> None:
    """Raises: ValueError naming the limit, its value and its range."""
    at_least_one = (
        "max_loras", "max_num_seqs", "max_num_batched_tokens", "num_pages", "page_size",
        "page_bytes", "max_queued_requests", "quantum", "turn_max_steps", "min_chunk",
        "prefetch_adapters", "max_wanted",
    )  # fmt: skip
    for name in at_least_one:
        if getattr(limits, name) < 1:
            raise ValueError(f"{name} is {getattr(limits, name)}; must be at least 1")
    ranges = (
        ("num_slots", limits.num_slots, limits.max_loras, "max_loras"),
        ("max_num_batched_tokens", limits.max_num_batched_tokens, limits.max_num_seqs,
         "max_num_seqs, or decodes alone would not fit a step"),
        ("context_tokens", limits.context_tokens, 2, "a prompt token and an answer"),
        ("closing_steps", limits.closing_steps, 0, "no soft close"),
    )  # fmt: skip
    for name, value, least, why in ranges:
        if value < least:
            raise ValueError(f"{name} is {value}; must be at least {least} ({why})")
    if limits.run_ahead not in (0, 1):
        raise ValueError(f"run_ahead is {limits.run_ahead}; must be 0 or 1")


def arena_tokens(limits: EngineLimits, adapter_pages: int) -> int:
    """Tokens of one sequence that fit an arena holding nothing but its adapter; its last token
    needs no KV."""
    return (limits.num_pages - adapter_pages) * limits.page_size + 1
