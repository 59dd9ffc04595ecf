"""The exit status of a command by the cause of its failure, the same for all of them."""

from __future__ import annotations

import grpc

DONE = 0
INTERNAL = 1
USAGE = 2
INTERRUPTED = 130

_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: USAGE,
    grpc.StatusCode.NOT_FOUND: 3,
    grpc.StatusCode.FAILED_PRECONDITION: 4,
    grpc.StatusCode.ALREADY_EXISTS: 5,
    grpc.StatusCode.ABORTED: 5,
    grpc.StatusCode.UNAVAILABLE: 6,
    grpc.StatusCode.DEADLINE_EXCEEDED: 6,
    grpc.StatusCode.UNAUTHENTICATED: 7,
    grpc.StatusCode.PERMISSION_DENIED: 7,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 8,
    grpc.StatusCode.DATA_LOSS: 9,
}


def exit_code(code: grpc.StatusCode) -> int:
    return _BY_CODE.get(code, INTERNAL)
