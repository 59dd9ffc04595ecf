"""Bytes that are no request get INVALID_ARGUMENT; gRPC itself would answer UNKNOWN with a Python
exception's text.

The deserializer cannot answer a call, so it hands the handler an `Undecodable`, which `mapped`
refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from loraplex.status import FieldInvalid


@dataclass(frozen=True, slots=True)
class Undecodable:
    """In place of a request."""

    num_bytes: int

    def refusal(self) -> FieldInvalid:
        value = f"{self.num_bytes} bytes"
        return FieldInvalid("request", value, "a serialized message of this RPC's request type")


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """For the methods of one service, all of them `mapped`."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix):
            return handler
        return handler._replace(request_deserializer=_told(handler.request_deserializer))


def _told(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_tell(content: bytes) -> Any:
        try:
            return decode(content)
        except DecodeError:
            return Undecodable(len(content))

    return decode_or_tell
