"""The engine's vocabulary: one frozen type for each border that a request crosses.

Long for one file, on purpose: it is the page from which a reader learns the engine, and every part
imports it; it holds types alone. What the core shows of itself is in engine_svc/snapshots.py, the
rows of a step in engine_svc/step_chunks.py.

    Request            frontend → core
    StepPlan           core → runner        (Chunks, SeatOpening, SlotBinding, PageCopy)
    StepResult         runner → core        (Sample)
    StepOutputs        core → frontend      (Admitted, SequenceOutput, RequestEnded)
    SlotLoad           core → slot writer   (HostSpan)

Ids are small integers: a *page* is an index into the arena, a *seat* one of max_num_seqs rows of
sampler state, a *slot* a row of the site table. −1 means none. Times are seconds of
CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_svc.step_chunks import Chunks

#: A flow's, slot's or chunk's adapter when it is the bare base model.
BASE_DIGEST = ""
NO_SLOT = -1


class ServiceClass(enum.IntEnum):
    INTERACTIVE = 1
    BATCH = 2


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One adapter version, as a name resolved to it at admission."""

    name: str
    version: int
    digest: str
    tenant: str = ""
    public: bool = False
    max_rank: int = 0
    weight: float = 1.0
    #: the adapter's own chat template where it differs from the base's
    chat_template: str | None = None
    #: (name, token) of the special tokens that its chat template names, None: the base's
    template_tokens: tuple[tuple[str, str], ...] | None = None
    #: the adapter's own end-of-sequence ids where they differ from the base's
    eos_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class FlowKey:
    """What shares the GPU fairly. `digest` is BASE_DIGEST for the base model."""

    service_class: ServiceClass
    tenant: str
    digest: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved and validated: no field is unset. Stop strings stay in the frontend."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    n: int = 1
    min_tokens: int = 0
    #: end-of-sequence ids, empty with ignore_eos; a match ends the choice, min_tokens permitting
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: number of most likely tokens to report beside each sampled one; None = no log probabilities
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One admitted-or-refused unit of work; `request_id` is unique in the engine's life."""

    request_id: str
    flow: FlowKey
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    received_s: float
    #: None: the bare base model
    adapter: AdapterRef | None = None
    deadline_s: float = math.inf
    cache_salt: str = ""
    #: what the client calls it; several requests may have the same. Empty: request_id
    client_request_id: str = ""


# ---- core → runner


@dataclass(frozen=True, slots=True)
class SeatOpening:
    """A seat gets a sequence: the sampler resets the seat's state before this step's forward.

    `output_token_ids` is not empty for a sequence that comes back after a preemption.
    """

    seat: int
    sampling: SamplingParams
    #: 0 … n − 1; randomness is a function of (sampling.seed, choice, position) alone
    choice: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotBinding:
    """The step writes this row of the site table; its pages hold the adapter's bytes already."""

    slot: int
    digest: str
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Before the forward: `target` becomes a copy of `source` (a fork's last, partial page)."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that one step does, in order: slot bindings, page copies, seat openings, forward, sample.

    Chunks with equal slot are adjacent; NO_SLOT (the base) comes last.
    """

    step: int
    chunks: Chunks
    seat_openings: tuple[SeatOpening, ...] = ()
    slot_bindings: tuple[SlotBinding, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()
    #: 0: planned after the previous step was committed; 1: while it still ran
    run_ahead: int = 0

    @property
    def num_tokens(self) -> int:
        return self.chunks.num_tokens

    @property
    def num_adapters(self) -> int:
        return len(set(self.chunks.slots) - {NO_SLOT})


@dataclass(frozen=True, slots=True)
class LateInputs:
    """What sampling needs and planning did not have.

    Grammar masks by seat; bit i of a mask: token i is allowed.
    """

    token_masks: tuple[tuple[int, bytes], ...] = ()


# ---- runner → core


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token and of the most likely ones, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sample(NamedTuple):
    """One seat's token. −1: the row's logits were not finite, and the sequence must fail."""

    seat: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt tokens at positions first_position … of the seat's
    sequence."""

    seat: int
    first_position: int
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    step: int
    samples: tuple[Sample, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    #: seconds of device (or CPU) work
    compute_s: float = 0.0


# ---- core → frontend


class FinishReason(enum.IntEnum):
    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request is in the queue; the first thing its client hears."""

    request_id: str


class SequenceOutput(NamedTuple):
    """New tokens of one choice. A stopping token is one of them, and named by stop_token_id."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int = -1


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds between received and first planned, by cause."""

    place_s: float = 0.0
    load_s: float = 0.0
    kv_s: float = 0.0
    budget_s: float = 0.0

    @property
    def queue_s(self) -> float:
        return self.place_s + self.load_s + self.kv_s + self.budget_s


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What the core counted for one request."""

    waits: Waits = field(default_factory=Waits)
    paused_s: float = 0.0
    #: the adapter's last load: wanted → in a slot; 0 for the base
    load_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    discarded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of loraplex.status as plain strings: gRPC code name, reason, message, metadata."""

    code: str
    reason: str
    message: str
    metadata: tuple[tuple[str, str], ...] = ()
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The last item of a request: all choices finished, or `failure`."""

    request_id: str
    stats: RequestStats
    failure: Failure | None = None
    #: of the prompt's tokens from the second on: nothing precedes the first
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


OutputItem = Admitted | SequenceOutput | RequestEnded


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """One message a step for each frontend that has something to hear."""

    step: int
    items: tuple[OutputItem, ...]


# ---- adapter weights


@dataclass(frozen=True, slots=True)
class HostSpan:
    """Bytes of one packed adapter in the host cache region, 4096-aligned (engine_svc/packed.py)."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """Copy the page images of a packed adapter into these arena pages, off the step path."""

    slot: int
    digest: str
    span: HostSpan
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightsReady:
    """Loader → core: packed weights lie in the host cache until the core drops them."""

    digest: str
    span: HostSpan
    num_pages: int
    #: bytes of the adapter's own matrices
    used_bytes: int
    #: where they came from: "store", "disk" or "host"
    tier: str
    load_s: float


@dataclass(frozen=True, slots=True)
class WeightsFailed:
    """Loader → core: this adapter cannot be loaded; only its requests fail."""

    digest: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """What one tenant may have in the queue, over all its adapters and classes."""

    max_queued_requests: int
    max_queued_tokens: int


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the configuration and the arena allow; all counts."""

    max_loras: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    page_size: int
    page_bytes: int
    num_slots: int
    context_tokens: int
    max_queued_requests: int = 4096
    #: prompt tokens of the requests that wait for their first step
    max_queued_tokens: int = 4 * 2**20
    #: of a tenant that set_quotas does not name; None: no limit of its own
    tenant_quota: TenantQuota | None = None
    #: a request that would wait longer is refused at once
    max_queue_wait_s: float = 30.0
    #: of this many grants of a place one goes to class batch, when both classes ask
    batch_grant_every: int = 4
    #: service of one prompt token and of one generated token
    prefill_price: float = 1.0
    decode_price: float = 2.0
    #: service after which a turn ends while somebody waits; 0: computed from the other limits
    quantum: int = 0
    #: "fair", or "resident-first": places are kept while their adapter has work, as a baseline
    policy: str = "fair"
    #: a turn ends after so many steps while somebody waits, unless pages are short; 0: not before
    #: turn_max_steps
    turn_steps: int = 0
    turn_max_steps: int = 512
    closing_steps: int = 16
    min_chunk: int = 16
    run_ahead: int = 0
    prefix_cache: bool = True
    #: adapters at the head of the ring whose weights are copied into slots before their turn
    prefetch_adapters: int = 2
    #: adapters that the core has asked for and not dropped yet
    max_wanted: int = 16
