"""Errors that reach a caller, and their one mapping to gRPC statuses, both ways.

LoraplexError
├── InvalidArgument (PROMPT_TOO_LONG, PROMPT_EMPTY, CHAT_TEMPLATE_FAILED, PAGE_TOKEN_INVALID,
│   │                SOURCE_NOT_ALLOWED)
│   └── FieldInvalid (FIELD_INVALID) ── NameInvalid, SamplingInvalid
├── NotFound (ADAPTER_, VERSION_, BASE_MODEL_, UPLOAD_, SOURCE_, TENANT_, MODEL_NOT_FOUND)
├── AlreadyExists (NAME_TAKEN)
├── FailedPrecondition (DATABASE_NOT_MIGRATED, VERSION_NOT_ACTIVE, …)
│   ├── AdapterRefused (every cause for which an adapter is not published or not loaded)
│   └── BaseModelUnsupported
├── Aborted (ETAG_MISMATCH, REQUEST_ID_REUSED)
├── ResourceExhausted (QUEUE_FULL, WAIT_EXCEEDS_DEADLINE, READER_TOO_SLOW, SIZE_LIMIT, …)
├── Unavailable (DRAINING, STARTING, REGISTRY_UNREACHABLE, BLOB_STORE_UNREACHABLE, ENGINE_LOST, …)
├── DataLoss (DIGEST_MISMATCH)
├── Unauthenticated, PermissionDenied, DeadlineExceeded, Cancelled, Unimplemented
└── Internal (INVARIANT)

Any of them with TRANSPORT: no server said it, see `from_rpc_error`.

A class fixes the gRPC code; `reason` is a name of the closed list in
protos/loraplex/common/v1/common.proto without its prefix; `metadata` are the strings of
google.rpc.ErrorInfo. A message says what, which id, what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from loraplex.common.v1 import common_pb2

DOMAIN = "loraplex"
REASONS = frozenset(
    name.removeprefix("ERROR_REASON_")
    for name in common_pb2.ErrorReason.keys()  # noqa: SIM118 - an enum wrapper, not a dict
)
#: Codes that gRPC itself gives for one cause only; the reason of any other is TRANSPORT.
_ONE_CAUSE = frozenset(
    (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNIMPLEMENTED,
    )
)
_VALUE_LIMIT = 200


class LoraplexError(Exception):
    """Base of the tree. `retry_after_s` becomes google.rpc.RetryInfo."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    default_reason: ClassVar[str] = "INVARIANT"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s
        assert self.reason in REASONS, self.reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.reason, self.metadata, self.retry_after_s)


class InvalidArgument(LoraplexError):
    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "FIELD_INVALID"


class FieldInvalid(InvalidArgument):
    """A field with a value outside its limit."""

    def __init__(self, field: str, value: object, limit: str, *, reason: str | None = None) -> None:
        shown = _shown(value)
        super().__init__(
            f"{field} is {shown}; must be {limit}",
            reason=reason or type(self).default_reason,
            metadata={"field": field, "value": shown, "limit": limit},
        )


class NameInvalid(FieldInvalid):
    default_reason = "NAME_INVALID"


class SamplingInvalid(FieldInvalid):
    default_reason = "SAMPLING_INVALID"


class NotFound(LoraplexError):
    code = grpc.StatusCode.NOT_FOUND
    default_reason = "ADAPTER_NOT_FOUND"


class AlreadyExists(LoraplexError):
    code = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "NAME_TAKEN"


class FailedPrecondition(LoraplexError):
    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "CONFIG_INVALID"


class AdapterRefused(FailedPrecondition):
    """This adapter is not published, or not loaded; the reason and the message say why."""


class BaseModelUnsupported(FailedPrecondition):
    """A base model folder that this build cannot serve."""

    default_reason = "CONFIG_INVALID"

    def __init__(self, field: str, value: object, limit: str) -> None:
        shown = _shown(value)
        super().__init__(
            f"base model: {field} is {shown}; supported: {limit}",
            metadata={"field": field, "value": shown, "limit": limit},
        )


class Aborted(LoraplexError):
    code = grpc.StatusCode.ABORTED
    default_reason = "ETAG_MISMATCH"


class ResourceExhausted(LoraplexError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "QUEUE_FULL"


class Unavailable(LoraplexError):
    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "DRAINING"


class DataLoss(LoraplexError):
    code = grpc.StatusCode.DATA_LOSS
    default_reason = "DIGEST_MISMATCH"


class Unauthenticated(LoraplexError):
    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "CREDENTIAL_INVALID"


class PermissionDenied(LoraplexError):
    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "TENANT_FORBIDDEN"


class DeadlineExceeded(LoraplexError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(LoraplexError):
    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class Unimplemented(LoraplexError):
    code = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "NOT_SUPPORTED"


class Internal(LoraplexError):
    code = grpc.StatusCode.INTERNAL
    default_reason = "INVARIANT"


_CLASS_OF_CODE: Mapping[grpc.StatusCode, type[LoraplexError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, Aborted, ResourceExhausted,
        Unavailable, DataLoss, Unauthenticated, PermissionDenied, DeadlineExceeded, Cancelled,
        Unimplemented, Internal,
    )
}  # fmt: skip


def to_status(error: LoraplexError) -> status_pb2.Status:
    """The google.rpc.Status of an error, with ErrorInfo and, where known, RetryInfo."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata)
    details = [_packed(info)]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=error.code.value[0], message=error.message, details=details)


def to_grpc(error: LoraplexError) -> Any:
    """What `context.abort_with_status` takes."""
    return rpc_status.to_status(to_status(error))


def of_code(
    code: grpc.StatusCode | str,
    message: str,
    reason: str | None = None,
    metadata: Mapping[str, str] | None = None,
    retry_after_s: float | None = None,
) -> LoraplexError:
    """The error of a code (or its name) that another process reported in plain strings.

    Raises: KeyError when `code` is a name that gRPC does not know.
    """
    code = grpc.StatusCode[code] if isinstance(code, str) else code
    kind = _CLASS_OF_CODE.get(code, Internal)
    return _rebuild(kind, message, reason or kind.default_reason, metadata or {}, retry_after_s)


def from_rpc_error(error: grpc.RpcError) -> LoraplexError:
    """The error that a server sent, or the transport's own as the nearest class of the tree with
    reason TRANSPORT."""
    code, message = error.code(), error.details() or str(error.code())
    status = rpc_status.from_call(error)
    reason, metadata, retry_after_s = None, {}, None
    if status is None and code not in _ONE_CAUSE:
        reason = "TRANSPORT"
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in REASONS:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return of_code(code, message, reason, metadata, retry_after_s)


def was_answered(error: grpc.RpcError) -> bool:
    """Whether one of our servers gave the error; else it is the transport's own."""
    return rpc_status.from_call(error) is not None


def _rebuild(
    kind: type[LoraplexError],
    message: str,
    reason: str,
    metadata: Mapping[str, str],
    retry_after_s: float | None,
) -> LoraplexError:
    error = kind.__new__(kind)
    LoraplexError.__init__(
        error, message, reason=reason, metadata=metadata, retry_after_s=retry_after_s
    )
    return error


def _packed(message: Any) -> any_pb2.Any:
    box = any_pb2.Any()
    box.Pack(message)
    return box


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_LIMIT else text[:_VALUE_LIMIT] + "…"
