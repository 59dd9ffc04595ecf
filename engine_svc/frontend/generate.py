"""One Generate call, from the request to its last message.

    read tenant, model, prompt, sampling → submit to the core → Answer makes messages → write

Whatever ends the call early (client gone, deadline, error, slow reader, drain), the core hears of
it at once, and the observer gets one record.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from engine_svc.frontend.answer import Answer, Pace
from engine_svc.frontend.choices import Choice
from engine_svc.frontend.core_link import CoreLink, OutputStream, require_serving
from engine_svc.frontend.inputs import Prompt, PromptReader
from engine_svc.frontend.models import Models, identity_of, tenant_of
from engine_svc.frontend.observer import FrontendObserver, RequestRecord
from engine_svc.frontend.router import ending
from engine_svc.frontend.sampling import ResolvedSampling, resolve_sampling
from engine_svc.frontend.text.model_text import ModelText
from engine_svc.types import (
    BASE_DIGEST,
    AdapterRef,
    FlowKey,
    Request,
    RequestEnded,
    RequestStats,
    ServiceClass,
)
from loraplex.engine.v1 import engine_pb2
from loraplex.status import Cancelled, FieldInvalid, LoraplexError

_REQUEST_ID_LIMIT = 128
_SALT_LIMIT = 256
#: The client's clock ends a call a little before ours; that is its deadline, not a cancel.
_DEADLINE_SLACK_S = 0.05


@dataclass(frozen=True, slots=True)
class Serving:
    """What all calls of one frontend share."""

    link: CoreLink
    models: Models
    text: ModelText
    prompts: PromptReader
    observer: FrontendObserver
    #: CLOCK_MONOTONIC in seconds, as the core reads it
    now: Callable[[], float] = time.monotonic


class GenerateCall:
    """State of one call; `run` is called once."""

    def __init__(self, serving: Serving, context: Any) -> None:
        self._serving = serving
        self._context = context
        self._received_s = serving.now()
        remaining_s = context.time_remaining()
        self._deadline_s = math.inf if remaining_s is None else self._received_s + remaining_s
        self._stream: OutputStream | None = None
        self._core_id = uuid.uuid4().hex
        # what the record says, as far as the call got
        self._shown_id = self._core_id
        self._tenant = ""
        self._model = ""
        self._adapter: AdapterRef | None = None
        self._answer: Answer | None = None
        self._num_prompt_tokens = 0
        self._num_choices = 0

    async def run(self, request: engine_pb2.GenerateRequest) -> None:
        """Answer the request. Raises: LoraplexError, for the wrapper to tell the client."""
        outcome, reason = "OK", ""
        try:
            await self._run(request)
        except LoraplexError as error:
            outcome, reason = error.code.name, error.reason
            raise
        except asyncio.CancelledError:
            is_late = self._serving.now() >= self._deadline_s - _DEADLINE_SLACK_S
            outcome = reason = "DEADLINE_EXCEEDED" if is_late else "CANCELLED"
            raise
        except BaseException:
            outcome, reason = "INTERNAL", "INVARIANT"
            raise
        finally:
            self._serving.observer.request_ended(self._record(outcome, reason))

    def cut(self, error: LoraplexError) -> None:
        """End the call from outside, once a write that is under way has passed. A call that has not
        reached the core yet meets the link's phase there."""
        if self._stream is not None:
            self._stream.cut(ending(self._core_id, error))

    async def _run(self, request: engine_pb2.GenerateRequest) -> None:
        link = self._serving.link
        core_request, answer = await self._prepare(request)
        self._answer = answer
        self._stream = stream = link.submit(core_request)
        try:
            await self._write(stream, answer)
        except grpc.aio.InternalError as error:
            raise Cancelled("the client is gone") from error
        finally:
            if stream.was_cut or not stream.ended:
                link.cancel(core_request.request_id)

    async def _write(self, stream: OutputStream, answer: Answer) -> None:
        write = self._context.write
        while items := await stream.take():
            for message in answer.begin(items):
                await write(message)
                if message.HasField("delta") and message.delta.token_ids:
                    answer.pace.sent()
            last = items[-1]
            if isinstance(last, RequestEnded):
                await write(answer.end(last))

    async def _prepare(self, request: engine_pb2.GenerateRequest) -> tuple[Request, Answer]:
        serving = self._serving
        self._tenant = tenant_of(self._context.invocation_metadata())
        self._shown_id = _request_id(request) or self._core_id
        require_serving(serving.link.phase)
        service_class = _service_class(request)
        self._adapter = adapter = serving.models.resolve(request.model, self._tenant)
        self._model = serving.models.base_model if adapter is None else adapter.name
        prompt = await serving.prompts.read(request, adapter)
        self._num_prompt_tokens = len(prompt.token_ids)
        resolved = resolve_sampling(
            request.sampling,
            num_prompt_tokens=len(prompt.token_ids),
            context_tokens=serving.text.context_tokens,
            vocab_size=serving.text.vocab_size,
            eos_token_ids=_eos_token_ids(serving.text, adapter),
        )
        self._num_choices = resolved.sampling.n
        digest = BASE_DIGEST if adapter is None else adapter.digest
        core_request = Request(
            request_id=self._core_id,
            flow=FlowKey(service_class, self._tenant, digest),
            prompt_token_ids=prompt.token_ids,
            sampling=resolved.sampling,
            received_s=self._received_s,
            adapter=adapter,
            deadline_s=self._deadline_s,
            cache_salt=_cache_salt(request, self._tenant),
        )
        return core_request, self._new_answer(request, prompt, resolved)

    def _new_answer(
        self, request: engine_pb2.GenerateRequest, prompt: Prompt, resolved: ResolvedSampling
    ) -> Answer:
        serving, sampling = self._serving, resolved.sampling
        started = engine_pb2.Started(
            request_id=self._shown_id,
            adapter=identity_of(self._adapter),
            base_model=serving.models.base_model,
            seed=sampling.seed,
            prompt_tokens=len(prompt.token_ids),
            prompt_token_ids=prompt.token_ids if request.return_inputs else (),
            prompt=prompt.text if request.return_inputs else "",
        )
        detokenizer = serving.text.detokenizer
        choices = [
            Choice(detokenizer(prompt.token_ids), resolved.stops, sampling.min_tokens)
            for _ in range(sampling.n)
        ]

        def stop_choice(choice: int, keep_tokens: int) -> None:
            serving.link.stop_choice(self._core_id, choice, keep_tokens)

        pace = Pace(self._received_s, serving.now)
        return Answer(started, choices, detokenizer, stop_choice, pace)

    def _record(self, outcome: str, reason: str) -> RequestRecord:
        answer, adapter = self._answer, self._adapter
        return RequestRecord(
            request_id=self._shown_id,
            tenant=self._tenant,
            model=self._model,
            adapter_version=0 if adapter is None else adapter.version,
            adapter_digest="" if adapter is None else adapter.digest,
            outcome=outcome,
            reason=reason,
            duration_s=self._serving.now() - self._received_s,
            ttft_s=None if answer is None else answer.pace.ttft_s,
            tpot_s=None if answer is None else answer.tpot_s,
            choices=self._num_choices,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=0 if answer is None else answer.completion_tokens,
            discarded_tokens=0 if answer is None else answer.discarded_tokens,
            stats=RequestStats() if answer is None else answer.stats,
        )


def _request_id(request: engine_pb2.GenerateRequest) -> str:
    value = request.request_id
    if len(value) > _REQUEST_ID_LIMIT or not value.isprintable():
        limit = f"at most {_REQUEST_ID_LIMIT} printable characters"
        raise FieldInvalid("request_id", value, limit)
    return value


def _service_class(request: engine_pb2.GenerateRequest) -> ServiceClass:
    value = request.service_class or engine_pb2.SERVICE_CLASS_INTERACTIVE
    if value not in (engine_pb2.SERVICE_CLASS_INTERACTIVE, engine_pb2.SERVICE_CLASS_BATCH):
        raise FieldInvalid("service_class", value, "INTERACTIVE (1) or BATCH (2)")
    return ServiceClass(value)


def _cache_salt(request: engine_pb2.GenerateRequest, tenant: str) -> str:
    """The tenant is always part of it: no salt opens another tenant's prefixes."""
    if len(request.cache_salt) > _SALT_LIMIT:
        limit = f"at most {_SALT_LIMIT} characters"
        raise FieldInvalid("cache_salt", request.cache_salt, limit)
    return f"{tenant}/{request.cache_salt}" if request.cache_salt else tenant


def _eos_token_ids(text: ModelText, adapter: AdapterRef | None) -> tuple[int, ...]:
    if adapter is not None and adapter.eos_token_ids is not None:
        return adapter.eos_token_ids
    return text.eos_token_ids
