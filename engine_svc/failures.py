"""Errors as they travel between the engine's processes: `Failure` ⇄ loraplex.status, both ways."""

from __future__ import annotations

from engine_svc.types import Failure
from loraplex.status import LoraplexError, of_code


def failure_of(error: LoraplexError) -> Failure:
    """The plain strings of an error."""
    return Failure(
        code=error.code.name,
        reason=error.reason,
        message=error.message,
        metadata=tuple(error.metadata.items()),
        retry_after_s=error.retry_after_s,
    )


def error_of(failure: Failure) -> LoraplexError:
    """The error that a core or loader reported."""
    return of_code(
        failure.code,
        failure.message,
        failure.reason,
        dict(failure.metadata),
        failure.retry_after_s,
    )
