"""Exit status by cause, the same as registryctl's."""

from __future__ import annotations

import grpc

DONE = 0
INTERNAL = 1

_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: 2,
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
EPILOG = """exit codes:
  0 done    1 internal error    2 bad argument    3 not found    4 refused
  6 not reachable, or no answer in time    7 not allowed    8 a limit is reached
  9 bytes do not have their digest"""


def exit_code(code: grpc.StatusCode) -> int:
    return _BY_CODE.get(code, INTERNAL)
