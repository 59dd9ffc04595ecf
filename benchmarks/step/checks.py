"""A fast wrong answer is no answer: what the tokens of a run must look like, whatever the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: tokens by which streams are told apart
COMPARED = 16

Stream = tuple[int, ...]


def problems(title: str, slots: Sequence[int], tokens: Sequence[Stream]) -> list[str]:
    """Of one run of equal prompts: `slots` and `tokens` by sequence, −1 the base.

    A token −1 is the sampler's word for logits that are not finite. Two adapters, or an adapter and
    the base, that stream the same tokens mean that one of them was not applied.
    """
    found = []
    if any(token < 0 for stream in tokens for token in stream):
        found.append(f"{title}: logits were not finite")
    by_slot = streams_by_slot(slots, tokens)
    distinct = {stream[:COMPARED] for stream in by_slot.values()}
    if len(distinct) < len(by_slot):
        found.append(f"{title}: {len(by_slot)} adapters gave {len(distinct)} different answers")
    return found


def without_effect(base: Stream, title: str, by_slot: Mapping[int, Stream]) -> list[str]:
    """Adapters that answer as the base does."""
    return [
        f"{title}: slot {slot} answers as the base"
        for slot, stream in by_slot.items()
        if slot >= 0 and stream[:COMPARED] == base[:COMPARED]
    ]


def streams_by_slot(slots: Sequence[int], tokens: Sequence[Stream]) -> dict[int, Stream]:
    """The first sequence of each."""
    found: dict[int, Stream] = {}
    for slot, stream in zip(slots, tokens, strict=True):
        found.setdefault(slot, stream)
    return found


def agreement(slots: Sequence[int], tokens: Sequence[Stream]) -> float:
    """Share of sequences whose first token is that of the first sequence of their slot.

    Equal prompts give equal sums but where a kernel splits them otherwise for another row; then a
    close call between two tokens may fall otherwise.
    """
    first = streams_by_slot(slots, tokens)
    equal = sum(stream[0] == first[slot][0] for slot, stream in zip(slots, tokens, strict=True))
    return equal / len(slots)
