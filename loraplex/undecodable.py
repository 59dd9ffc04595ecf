"""Bytes that are no request get INVALID_ARGUMENT; gRPC itself would answer with INTERNAL or UNKNOWN
and a Python exception's text.

The deserializer cannot answer a call, so it hands the handler an `Undecodable`, which the code
around each handler refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from loraplex.status import FieldInvalid


@dataclass(frozen=True, slots=True)
class Undecodable:
    """In place of a request."""

    num_bytes: int

    def refusal(self) -> FieldInvalid:
        value = f"{self.num_bytes} bytes"
        return FieldInvalid("request", value, "a serialized message of this RPC's request type")


def telling(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """`decode`, which gives an Undecodable where it would raise."""

    def decode_or_tell(content: bytes) -> Any:
        try:
            return decode(content)
        except DecodeError:
            return Undecodable(len(content))

    return decode_or_tell
