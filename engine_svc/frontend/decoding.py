"""Bytes that are no request reach `mapped` as an `Undecodable`, which it refuses."""

from __future__ import annotations

from typing import Any

import grpc

from loraplex.undecodable import telling


class DecodingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is untyped
    """For the methods of one service, all of them `mapped`."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(self._prefix):
            return handler
        return handler._replace(request_deserializer=telling(handler.request_deserializer))
