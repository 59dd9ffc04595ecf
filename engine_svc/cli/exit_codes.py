"""Exit status by cause, the same for every command."""

from __future__ import annotations

import grpc

OK = 0
FAILED = 1
USAGE = 2
NOT_FOUND = 3
REFUSED = 4
UNAVAILABLE = 5
DATA_LOSS = 6
DENIED = 7

_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: USAGE,
    grpc.StatusCode.NOT_FOUND: NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION: REFUSED,
    grpc.StatusCode.ALREADY_EXISTS: REFUSED,
    grpc.StatusCode.ABORTED: REFUSED,
    grpc.StatusCode.UNAVAILABLE: UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS: DATA_LOSS,
    grpc.StatusCode.UNAUTHENTICATED: DENIED,
    grpc.StatusCode.PERMISSION_DENIED: DENIED,
}


def exit_code(code: grpc.StatusCode) -> int:
    return _BY_CODE.get(code, FAILED)
