"""Page sizes and page tokens: a token holds the last key and what the list was asked for."""

from __future__ import annotations

import base64
import json

from loraplex.status import FieldInvalid, InvalidArgument
from registry_svc.domain import Page

DEFAULT_SIZE = 100
MAX_SIZE = 1000


def read_page(page_size: int, page_token: str, query: str) -> Page:
    """The page that a request asks for; `query` names the list and its filters.

    Raises: FieldInvalid page_size; InvalidArgument PAGE_TOKEN_INVALID.
    """
    if not 0 <= page_size <= MAX_SIZE:
        raise FieldInvalid("page_size", page_size, f"0 (read as {DEFAULT_SIZE}) to {MAX_SIZE}")
    size = page_size or DEFAULT_SIZE
    if not page_token:
        return Page(size)
    try:
        asked, after = json.loads(base64.urlsafe_b64decode(page_token.encode()))
    except (ValueError, TypeError) as error:
        raise _invalid(page_token, "one that this server wrote") from error
    if asked != query or not isinstance(after, str) or "\x00" in after:
        raise _invalid(page_token, "from the same list with the same filters")
    return Page(size, after)


def write_token(query: str, after: str) -> str:
    """The token of the page behind the key `after`."""
    return base64.urlsafe_b64encode(json.dumps([query, after]).encode()).decode()


def _invalid(token: str, limit: str) -> InvalidArgument:
    return InvalidArgument(
        f"page_token must be {limit}; start again without one",
        reason="PAGE_TOKEN_INVALID",
        metadata={"field": "page_token", "value": token[:200], "limit": limit},
    )
