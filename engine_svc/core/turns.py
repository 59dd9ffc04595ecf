"""Turns: an adapter's time in a place, bounded by service and by steps, ended softly.

running ──due while somebody waits──▶ closing (nobody new) ──closing_steps──▶ over
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine_svc.core.lane import Lane
from engine_svc.types import BASE_DIGEST, EngineLimits


@dataclass(slots=True, eq=False)
class Turn:
    """One lane in a place; service counts prefill × 1 + decode × 2."""

    lane: Lane
    first_step: int
    service: int = 0
    closing_since: int | None = None

    def is_due(self, step: int, limits: EngineLimits) -> bool:
        return (
            self.service >= limits.quantum * self.lane.weight
            or step - self.first_step >= limits.turn_max_steps
        )

    def is_over(self, step: int, limits: EngineLimits) -> bool:
        return self.closing_since is not None and step - self.closing_since >= limits.closing_steps


class Turns:
    """Who holds a place. The base takes turns too, but none of max_loras."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._turns: dict[str, Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(list(self._turns.values()))

    def __contains__(self, digest: object) -> bool:
        return digest in self._turns

    @property
    def num_free_places(self) -> int:
        return self._max_loras - len(self._turns) + (BASE_DIGEST in self._turns)

    def get(self, digest: str) -> Turn | None:
        return self._turns.get(digest)

    def begin(self, lane: Lane, step: int) -> None:
        assert lane.is_base or self.num_free_places > 0, "more turns than places"
        self._turns[lane.digest] = Turn(lane, step)

    def end(self, turn: Turn) -> None:
        del self._turns[turn.lane.digest]

    def check_integrity(self) -> None:
        assert self.num_free_places >= 0, "more turns than places"
        assert all(not turn.lane.in_ring for turn in self._turns.values())
