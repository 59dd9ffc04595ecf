"""Around every RPC: errors become statuses, one log line, one count and one time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from loraplex.status import Internal, LoraplexError, to_grpc
from loraplex.tenants import TENANT_METADATA
from registry_svc.metrics import Metrics

LOG = logging.getLogger("registry_svc")
_SERVICE = "/loraplex.registry.v1.AdapterRegistry/"
#: Request fields that a log line shows.
_SUBJECTS = ("name", "reference", "alias", "adapter", "upload_id", "source_uri", "engine_id")


class CallInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Wraps the handlers of AdapterRegistry; health and reflection pass as they are."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = continuation(details)
        if handler is None or not details.method.startswith(_SERVICE):
            return handler
        method = details.method.removeprefix(_SERVICE)
        if handler.response_streaming:
            inner = self._streaming(method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(
                inner, handler.request_deserializer, handler.response_serializer
            )
        unary = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = (
            grpc.stream_unary_rpc_method_handler
            if handler.request_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        inner = self._unary(method, unary)
        return make(inner, handler.request_deserializer, handler.response_serializer)

    def _unary(self, method: str, behaviour: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def call(request: Any, context: Any) -> Any:
            record = _Record(method, request, context, self._metrics)
            try:
                response = behaviour(request, context)
            except Exception as error:
                record.fail(error)
            record.end("OK")
            return response

        return call

    def _streaming(
        self, method: str, behaviour: Callable[[Any, Any], Iterator[Any]]
    ) -> Callable[..., Iterator[Any]]:
        def call(request: Any, context: Any) -> Iterator[Any]:
            record = _Record(method, request, context, self._metrics)
            try:
                yield from behaviour(request, context)
            except GeneratorExit:
                record.end("CANCELLED")
                raise
            except Exception as error:
                record.fail(error)
            record.end("OK" if context.is_active() else "CANCELLED")

        return call


class _Record:
    """One call: its fields for the log, and its end."""

    def __init__(self, method: str, request: Any, context: Any, metrics: Metrics) -> None:
        self._method, self._context, self._metrics = method, context, metrics
        self._start = time.perf_counter()
        self._fields: dict[str, Any] = {"method": method, "peer": context.peer()}
        for field in _SUBJECTS:
            value = getattr(request, field, None)
            if value:
                self._fields[field] = getattr(value, "name", None) or str(value)[:200]
        for key, value in context.invocation_metadata():
            if key == TENANT_METADATA:
                self._fields["tenant"] = str(value)[:200]

    def fail(self, error: Exception) -> None:
        """Log and end the call with the error's status; never returns."""
        if not self._context.is_active():
            self.end("CANCELLED")
            raise error
        if not isinstance(error, LoraplexError):
            LOG.error("rpc.failed", exc_info=error, extra={"fields": dict(self._fields)})
            error = Internal("internal error; the registry's log has the cause")
        self.end(error.code.name, reason=error.reason, message=error.message)
        self._context.abort_with_status(to_grpc(error))

    def end(self, code: str, **more: str) -> None:
        seconds = time.perf_counter() - self._start
        self._metrics.observe(self._method, code, seconds)
        fields = {**self._fields, "code": code, "seconds": round(seconds, 6), **more}
        LOG.info("rpc.ended", extra={"fields": fields})
