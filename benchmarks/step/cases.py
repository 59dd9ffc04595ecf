"""What `bench-step` measures: which adapter each sequence of a batch has, and who has measured it.

`PEER_TPOT_MS` is vLLM 0.26.0 on one H200 (CUDA graphs, compile, FlashAttention 3; prompt 512,
output 128), measured on 2026-11-29: it stands beside rows of the 8B shape on that GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: adapters by name: ranks, in the order in which they are loaded
RANK_16, RANK_64, MIXED = "rank 16", "rank 64", "ranks 8/16/64"


@dataclass(frozen=True, slots=True)
class Case:
    """`groups`: sequences of each adapter, the base first if `base` of them have none."""

    batch: int
    groups: tuple[int, ...]
    ranks: str = RANK_16
    name: str = ""

    @property
    def title(self) -> str:
        if self.name:
            return f"TPOT, {self.name}"
        if not self.groups:
            return f"TPOT, batch {self.batch}, base"
        adapters = "1 adapter" if len(self.groups) == 1 else f"{len(self.groups)} adapters"
        ranks = "" if self.ranks == RANK_16 else f", {self.ranks}"
        return f"TPOT, batch {self.batch}, {adapters}{ranks}"

    def slots(self, slots: Sequence[int]) -> list[int]:
        """The slot of each sequence, given the slots of the adapters of `ranks`; −1 = the base."""
        if not self.groups:
            return [-1] * self.batch
        return [slot for slot, count in zip(slots, self.groups, strict=False) for _ in range(count)]


def even(batch: int, adapters: int, ranks: str = RANK_16) -> Case:
    """`batch` sequences on `adapters` adapters, as evenly as it goes; 0: the base alone."""
    if not adapters:
        return Case(batch, (), ranks)
    least, more = divmod(batch, adapters)
    return Case(batch, tuple(least + (index < more) for index in range(adapters)), ranks)


def table(batches: Sequence[tuple[int, Sequence[int]]]) -> tuple[Case, ...]:
    return tuple(even(batch, adapters) for batch, counts in batches for adapters in counts)


#: (batch, adapters …) as the field's engine was measured
TABLE = table(
    (
        (1, (0, 1)),
        (8, (0, 8)),
        (64, (0, 1, 8, 32, 64)),
        (128, (0, 32, 64)),
        (256, (0, 8, 32, 64)),
    )
)
OTHER_RANKS = (even(64, 8, RANK_64), even(64, 8, MIXED), even(64, 32, MIXED))


def fragmented(tokens: int) -> tuple[Case, ...]:
    """The case that started loraplex: a few tokens of one, three or that many adapters."""
    first, second = tokens * 20 // 32, tokens * 8 // 32
    three = (first, second, tokens - first - second)
    shown = "+".join(map(str, three))
    cases = []
    for ranks in (RANK_16, MIXED):
        cases += [
            Case(tokens, (tokens,), ranks, f"{tokens} tokens as {tokens}, {ranks}"),
            Case(tokens, three, ranks, f"{tokens} tokens as {shown}, {ranks}"),
            Case(tokens, (1,) * tokens, ranks, f"{tokens} tokens as {tokens} × 1, {ranks}"),
        ]
    return tuple(cases)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. `prefill`: prompts, and on how many adapters; `max_loras`: few and
    many."""

    prompt: int
    output: int
    rounds: int
    batched_tokens: int
    cases: tuple[Case, ...]
    fragments: tuple[Case, ...]
    ranks: Mapping[str, tuple[int, ...]]
    prefill: tuple[int, tuple[int, ...]]
    core: tuple[Case, ...]
    places: Case
    max_loras: tuple[int, int]

    @property
    def max_num_seqs(self) -> int:
        return max(case.batch for case in (*self.cases, *self.fragments, *self.core, self.places))


FULL = Size(
    512, 128, 3, 8192, (*TABLE, *OTHER_RANKS), fragmented(32),
    {RANK_16: (16,) * 64, RANK_64: (64,) * 8, MIXED: (8, 16, 64) * 10 + (8, 16)},
    (256, (0, 1, 8, 64)), (even(256, 0), even(256, 64)), even(64, 1), (8, 256),
)  # fmt: skip
#: a dry run on a CPU
TINY = Size(
    32, 20, 2, 128, (*table(((1, (0, 1)), (4, (0, 1, 4)))), even(4, 2, RANK_64)), fragmented(8),
    {RANK_16: (4,) * 8, RANK_64: (8,) * 2, MIXED: (2, 4, 8) * 2 + (2, 4)},
    (4, (0, 2)), (even(4, 4),), even(4, 1), (4, 8),
)  # fmt: skip

PEER_TPOT_MS = {
    "TPOT, batch 1, base": 4.86,
    "TPOT, batch 1, 1 adapter": 5.95,
    "TPOT, batch 8, base": 5.07,
    "TPOT, batch 8, 8 adapters": 8.33,
    "TPOT, batch 64, base": 6.63,
    "TPOT, batch 64, 1 adapter": 7.81,
    "TPOT, batch 64, 8 adapters": 10.17,
    "TPOT, batch 64, 32 adapters": 20.67,
    "TPOT, batch 64, 64 adapters": 33.63,
    "TPOT, batch 64, 8 adapters, rank 64": 13.90,
    "TPOT, batch 128, base": 8.44,
    "TPOT, batch 128, 32 adapters": 21.39,
    "TPOT, batch 128, 64 adapters": 31.51,
    "TPOT, batch 256, base": 13.49,
    "TPOT, batch 256, 8 adapters": 18.27,
    "TPOT, batch 256, 32 adapters": 27.69,
    "TPOT, batch 256, 64 adapters": 39.50,
}
#: seconds for 256 prompts of 512 tokens, same source
PEER_PREFILL_S = {0: 3.066, 1: 3.961, 8: 4.051, 64: 6.630}
