"""The one place where an exception of a handler becomes a gRPC status."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import grpc

from engine_svc.frontend.decoding import Undecodable
from engine_svc.log import Log
from loraplex.status import Internal, LoraplexError, to_grpc


class HasLog(Protocol):
    @property
    def log(self) -> Log: ...


Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def mapped(method: Handler) -> Handler:
    """A servicer method that tells its client of a LoraplexError with code, reason and metadata,
    and of anything else only that it is a bug, which the log then shows with its stack."""

    @functools.wraps(method)
    async def wrapper(self: HasLog, request: Any, context: Any) -> Any:
        try:
            if isinstance(request, Undecodable):
                raise request.refusal()
            return await method(self, request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except LoraplexError as error:
            await _abort(context, error)
        except Exception:
            self.log.exception("rpc.failed", method=method.__name__)
            await _abort(context, internal())

    return wrapper  # type: ignore[return-value]  # same signature


def internal() -> Internal:
    """What a client hears of a bug of ours."""
    return Internal("the engine failed on this request; its log says why")


async def _abort(context: Any, error: LoraplexError) -> None:
    try:
        await context.abort_with_status(to_grpc(error))
    except grpc.aio.InternalError:
        # the client is gone; nobody is left to tell
        raise asyncio.CancelledError from None
