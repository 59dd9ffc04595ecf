"""What the step that is being planned will run, before it becomes a StepPlan."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_svc.core.sequence import Sequence
from engine_svc.core.waits import Cause


@dataclass(slots=True)
class Draft:
    """Everything that decodes in an adapter with a turn, but for `skipped`, and the chunks of
    `prompts`. Lists of decoding sequences hold few: most steps of a decode need no look at it."""

    #: tokens of what decodes
    num_decodes: int = 0
    #: each with its `share` of the step's tokens
    prompts: list[Sequence] = field(default_factory=list)
    #: decoding sequences that get no page in this step
    skipped: set[Sequence] = field(default_factory=set)
    #: decoding sequences that have filled a page before it, and those of which it is the last step
    filling: list[Sequence] = field(default_factory=list)
    ending: list[Sequence] = field(default_factory=list)

    #: what those who wait in open turns lack
    lacking: Cause | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.num_decodes or self.prompts)

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + sum(sequence.share for sequence in self.prompts)
