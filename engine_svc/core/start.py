"""Bring a waiting or suspended sequence into the running set: its seats, and pages to begin on."""

from __future__ import annotations

from engine_svc.core.books import Books
from engine_svc.core.pressure import Claim, make_room
from engine_svc.core.sequence import Sequence
from engine_svc.core.waits import Cause
from engine_svc.types import PageCopy


def pages_for(positions: int, page_size: int) -> int:
    return -(-positions // page_size)


def try_start(
    books: Books,
    sequence: Sequence,
    claim: Claim,
    max_tokens: int,
    now: float,
    ignore_kept: bool = False,
) -> Cause | None:
    """Start a sequence with pages for its next `max_tokens` tokens, or say what it lacks.

    With a modest claim it starts only if there is room for all its tokens, so that it is not
    preempted at once; a turn that begins makes room for one chunk.
    """
    if len(books.free_seats) < sequence.num_seats_needed:
        return Cause.SEAT
    num_cached = _share_prefix(books, sequence)
    left = sequence.num_left
    tokens = min(max_tokens, left)
    sure = left if claim is Claim.MODEST else tokens
    needed = num_pages_lacking(books, sequence, sure)
    kept = 0 if ignore_kept else books.memory.kept_pages
    if not make_room(books, needed, sequence, claim, now, kept):
        if num_cached:
            books.release_pages(sequence)
        return Cause.PAGES
    books.start(sequence, now)
    take_pages(books, sequence, tokens)
    return None


def take_pages(books: Books, sequence: Sequence, num_tokens: int) -> None:
    """Pages for the next `num_tokens` positions; there is room for them. A last page that other
    choices share is copied."""
    page_size = books.limits.page_size
    if sequence.live.shares_pages and needs_copy(books, sequence):
        index = sequence.num_planned // page_size
        copy = PageCopy(sequence.page_ids[index], books.memory.take())
        books.memory.release((copy.source,))
        sequence.page_ids[index] = copy.target
        sequence.page_copy = copy
        books.page_copies.append((sequence, copy))
    lacking = pages_for(sequence.num_planned + num_tokens, page_size) - len(sequence.page_ids)
    if lacking > 0:
        sequence.page_ids += books.memory.take_many(lacking)


def num_pages_lacking(books: Books, sequence: Sequence, num_tokens: int) -> int:
    """Pages to take before its next `num_tokens` positions can be written."""
    page_size, planned = books.limits.page_size, sequence.num_planned
    lacking = -(-(planned + num_tokens) // page_size) - len(sequence.page_ids)
    copied = sequence.live.shares_pages and needs_copy(books, sequence)
    return max(0, lacking) + copied


def needs_copy(books: Books, sequence: Sequence) -> bool:
    """The page of its next position is shared with another choice."""
    index, offset = divmod(sequence.num_planned, books.limits.page_size)
    if offset == 0 or index >= len(sequence.page_ids):
        return False
    return books.memory.pool.refs(sequence.page_ids[index]) > 1


def _share_prefix(books: Books, sequence: Sequence) -> int:
    """Refer to cached pages of a sequence that has none; returns their positions."""
    if sequence.page_ids or not books.limits.prefix_cache or not sequence.live.uses_prefix_index:
        return 0
    tokens = sequence.token_ids(0, sequence.num_known)
    nodes = books.memory.share_prefix(sequence.live.prefix_root, tokens)
    sequence.page_ids = [node.page for node in nodes]
    cached = len(nodes) * books.limits.page_size
    sequence.num_planned = cached
    sequence.num_indexed = len(nodes)
    sequence.index_node = nodes[-1] if nodes else None
    return cached
