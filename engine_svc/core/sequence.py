"""The mutable state of a request and of its choices.

    waiting ──start──▶ running ──suspend──▶ suspended ──start──▶ running … ──▶ ended
                          └─preempt─▶ suspended, without pages

A request begins as one sequence, its first choice. When the prompt's last chunk is planned, the
other choices fork from it: they share its pages and take the seats that it held for them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_svc.core.prefix_index import PrefixNode, Root
from engine_svc.core.waits import Reading
from engine_svc.types import (
    PageCopy,
    Request,
    RequestStats,
    TokenLogprobs,
    Waits,
)

if TYPE_CHECKING:
    from engine_svc.core.decodes import Decodes
    from engine_svc.core.flow import Flow
    from engine_svc.core.lane import Lane

#: order of arrival, then choice: who is older
Age = tuple[int, int]


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: its tokens, its pages, its seats, and how far steps have taken it."""

    live: LiveRequest
    flow: Flow
    choice: int
    #: tokens at which it ends: prompt + max_tokens, the context, or what the arena can hold
    max_total: int
    state: SequenceState = SequenceState.WAITING
    output_ids: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    #: its own seat; before the fork one for each choice
    seats: tuple[int, ...] = ()
    #: sampled tokens that are still in flight, unless it decodes
    pending: int = 0
    #: grows when its pages are taken away: results of older steps no longer describe its pages
    incarnation: int = 0
    #: the seat does not hold the last token, so the next chunk names its tokens; else it decodes,
    #: and each step that it is in computes one position and has one token in flight
    names_tokens: bool = True
    #: while it decodes: the step that looks at it; until then it needs no page and does not end
    alarm_step: int = -1
    #: positions that have been charged to a turn, unless it decodes, and the furthest that earlier
    #: pages reached
    num_charged: int = 0
    furthest: int = 0
    #: pages in the prefix index, and the last of them; None inside = the chain is not followed
    num_indexed: int = 0
    index_node: PrefixNode | None = None
    index_open: bool = True
    #: copy in the plan being made that gives it its own last page
    page_copy: PageCopy | None = None
    suspended_s: float = 0.0
    #: its tokens in the plan being made
    share: int = 0
    #: the decodes of every step, while it is one of them, and the step in which it joined
    decodes: Decodes | None = None
    joined_step: int = -1
    #: `num_planned` and `last_step`, while it decodes as they were when it joined
    _num_planned: int = 0
    _last_step: int = -1
    lane: Lane = field(init=False)
    num_prompt: int = field(init=False)
    age: Age = field(init=False)

    def __post_init__(self) -> None:
        self.lane = self.flow.lane
        self.num_prompt = len(self.live.request.prompt_token_ids)
        self.age = (self.live.order, self.choice)

    @property
    def num_planned(self) -> int:
        """Positions whose KV is written once all launched steps (and the one being planned) ran."""
        if self.decodes is None:
            return self._num_planned
        return self._num_planned + self.decodes.step - self.joined_step

    @num_planned.setter
    def num_planned(self, count: int) -> None:
        assert self.decodes is None, "the position of a decode follows from the step"
        self._num_planned = count

    @property
    def last_step(self) -> int:
        """The newest step that it is in."""
        if self.decodes is None or self.decodes.step == self.joined_step:
            return self._last_step
        return self.decodes.step - 1

    @last_step.setter
    def last_step(self, step: int) -> None:
        self._last_step = step

    @property
    def num_known(self) -> int:
        return self.num_prompt + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        """Sampled tokens that are still in flight."""
        return self.pending if self.names_tokens else self.num_planned + 1 - self.num_known

    @property
    def num_total(self) -> int:
        """Tokens, those in flight included."""
        if not self.names_tokens:
            return self.num_planned + 1
        return self.num_prompt + len(self.output_ids) + self.pending

    @property
    def num_left(self) -> int:
        """Tokens whose KV no step has been asked for: 1 in decoding."""
        return self.num_total - self.num_planned

    @property
    def exhausted(self) -> bool:
        """Its last token is in flight: nothing is left to plan."""
        return self.num_total >= self.max_total

    @property
    def has_advanced(self) -> bool:
        """It got further than ever before since it got its pages."""
        return self.num_planned > self.furthest

    @property
    def num_seats_needed(self) -> int:
        return 1 if self.live.forked else self.live.request.sampling.n

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        prompt = self.live.request.prompt_token_ids
        if end <= len(prompt):
            return prompt[start:end]
        first = max(start - len(prompt), 0)
        return prompt[start:] + tuple(self.output_ids[first : end - len(prompt)])

    def stop_decoding(self) -> None:
        """The seat, or what it holds, is lost: the next chunk names its tokens."""
        if not self.names_tokens:
            self.pending = self.num_pending
            self.num_charged = max(self.num_charged, self.num_planned)
            self.names_tokens = True

    def forget_pages(self) -> None:
        """The pages are gone: everything has to be computed again."""
        assert self.names_tokens, "a sequence that decodes loses its pages"
        self.furthest = max(self.furthest, self.num_planned)
        self.page_ids = []
        self.page_copy = None
        self.num_planned = self.num_indexed = 0
        self.index_node, self.index_open = None, True
        self.incarnation += 1


@dataclass(slots=True, eq=False)
class LiveRequest:
    """An admitted request until its RequestEnded."""

    request: Request
    #: 0, 1, 2 … in the order of admission
    order: int
    #: what the adapter's wait clock showed at admission
    arrived: Reading
    before_s: float
    sequences: list[Sequence] = field(default_factory=list)
    forked: bool = False
    ended: bool = False
    waits: Waits | None = None
    paused_s: float = 0.0
    load_s: float = 0.0
    cached_tokens: int = 0
    discarded_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def digest(self) -> str:
        return self.request.flow.digest

    @property
    def prefix_root(self) -> Root:
        return (self.request.cache_salt or self.request.flow.tenant, self.digest)

    @property
    def uses_prefix_index(self) -> bool:
        return self.request.sampling.prompt_logprobs is None

    @property
    def shares_pages(self) -> bool:
        """Its choices may share a page that is not full."""
        return len(self.sequences) > 1

    @property
    def finished(self) -> bool:
        return self.forked and all(s.state is SequenceState.ENDED for s in self.sequences)

    def stats(self) -> RequestStats:
        return RequestStats(
            waits=self.waits or Waits(),
            paused_s=self.paused_s,
            load_s=self.load_s,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            completion_tokens=sum(len(s.output_ids) for s in self.sequences),
            discarded_tokens=self.discarded_tokens,
        )
