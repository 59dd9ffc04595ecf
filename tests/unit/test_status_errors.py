"""What a client makes of an error status that no server of ours gave."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import status_pb2

from loraplex.status import LoraplexError, Unavailable, from_rpc_error, to_status

BOX_KEY = "grpc-status-details-bin"


class Failed(grpc.RpcError, grpc.Call):
    """A call's error as grpc raises it."""

    def __init__(self, code: grpc.StatusCode, status: status_pb2.Status | None = None) -> None:
        self._code = code
        self._pairs = [] if status is None else [(BOX_KEY, status.SerializeToString())]
        self._details = "said so" if status is None else status.message

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return self._pairs

    def initial_metadata(self) -> None: ...
    def is_active(self) -> bool:
        return False

    def time_remaining(self) -> None: ...
    def cancel(self) -> bool:
        return False

    def add_callback(self, callback: object) -> bool:
        return False


@pytest.mark.parametrize(
    "code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL", "UNKNOWN", "FAILED_PRECONDITION"]
)
def test_an_error_of_the_transport_itself_says_transport_and_no_servers_reason(code: str) -> None:
    error = from_rpc_error(Failed(grpc.StatusCode[code]))
    assert (error.reason, error.message) == ("TRANSPORT", "said so")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
        ("CANCELLED", "CANCELLED"),
        ("UNIMPLEMENTED", "NOT_SUPPORTED"),
    ],
)
def test_a_code_that_the_transport_gives_for_one_cause_keeps_its_reason(
    code: str, reason: str
) -> None:
    assert from_rpc_error(Failed(grpc.StatusCode[code])).reason == reason


def test_a_servers_own_error_arrives_as_it_was() -> None:
    sent = Unavailable("going", metadata={"a": "b"}, retry_after_s=1.5)
    error = from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, to_status(sent)))
    assert isinstance(error, LoraplexError)
    assert (error.reason, error.message, error.metadata, error.retry_after_s) == (
        "DRAINING", "going", {"a": "b"}, 1.5,
    )  # fmt: skip
