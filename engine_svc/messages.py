"""What crosses the Unix sockets between the engine's processes, pickled.

    frontend → core      Submit, Cancel, StopChoice, SnapshotRequest, ExplainRequest
    core → frontend      CoreHello, StepOutputs, SnapshotAnswer, ExplainAnswer
    core → loader        CoreHello, Want, Drop
    loader → core        WeightsReady, WeightsFailed, SharesChanged
    loader → frontend    NamesChanged
    supervisor → child   Boot, Drain
    child → supervisor   ChildReady, ChildNotReady, ChildFailed, PeerStalled

A frontend greets the core and the loader with FrontendHello, the core greets the loader with
CoreHello; nothing else is said before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_svc.settings import EngineSettings
from engine_svc.snapshots import CoreSnapshot, RequestExplanation
from engine_svc.types import AdapterRef, EngineLimits, Failure, Request

if TYPE_CHECKING:
    # the supervisor reads this module too, and does without gRPC
    from engine_svc.names import NameMapUpdate
    from engine_svc.shares import Shares

# ---- greetings


@dataclass(frozen=True, slots=True)
class FrontendHello:
    index: int
    pid: int


@dataclass(frozen=True, slots=True)
class CoreHello:
    """What others must know of a core that has loaded its model."""

    pid: int
    limits: EngineLimits
    #: compute type and page size fix the layout of packed adapters
    dtype: str
    page_size: int
    weights_bytes: int


# ---- frontend → core


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str
    #: what the request ends with; None: its client is gone
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class StopChoice:
    """A stop string ended this choice; tokens beyond `keep_tokens` count as discarded."""

    request_id: str
    choice: int
    keep_tokens: int


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    ticket: int


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    ticket: int
    #: the client's, or ours
    request_id: str


# ---- core → frontend


@dataclass(frozen=True, slots=True)
class SnapshotAnswer:
    ticket: int
    snapshot: CoreSnapshot


@dataclass(frozen=True, slots=True)
class ExplainAnswer:
    ticket: int
    #: None: no open request of that id
    explanation: RequestExplanation | None


# ---- core → loader


@dataclass(frozen=True, slots=True)
class Want:
    ref: AdapterRef
    #: place in the order of coming turns, 0 first
    rank: int


@dataclass(frozen=True, slots=True)
class Drop:
    digest: str


# ---- loader → core


@dataclass(frozen=True, slots=True)
class SharesChanged:
    """All weights and queue limits of the registry; replaces those before."""

    shares: Shares


# ---- loader → frontend


@dataclass(frozen=True, slots=True)
class NamesChanged:
    update: NameMapUpdate


@dataclass(frozen=True, slots=True)
class NamesStale:
    """Whether the registry has been silent for too long to serve adapters by its names."""

    is_stale: bool


# ---- supervisor ⇄ child


@dataclass(frozen=True, slots=True)
class Boot:
    """The first and only thing that a child needs to be told."""

    settings: EngineSettings
    engine_id: str
    #: host:port with the real port
    listen: str
    socket_dir: str
    host_region_path: str
    authkey: bytes
    #: which of the frontends; 0 for other children
    index: int = 0

    def __repr__(self) -> str:
        return f"Boot(engine_id={self.engine_id!r}, index={self.index})"


@dataclass(frozen=True, slots=True)
class Drain:
    """Take nothing new; end what is open within so many seconds, then exit."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ChildReady:
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChildNotReady:
    """It runs, but cannot serve; `cause` says why."""

    cause: str


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """It will exit, and starting it again would not help when `fatal`."""

    message: str
    fatal: bool


@dataclass(frozen=True, slots=True)
class PeerStalled:
    """The core gave up on a frontend that did not read for too long."""

    index: int
    pid: int
