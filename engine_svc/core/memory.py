"""The arena's book-keeping: pages, the prefix index and the slots, which all live in one pool."""

from __future__ import annotations

from collections.abc import Iterable

from engine_svc.core.pages import PagePool
from engine_svc.core.prefix_index import PrefixIndex, PrefixNode, Root, Tokens
from engine_svc.core.slots import Slot, SlotState, SlotTable
from engine_svc.types import EngineLimits


class Memory:
    """Takes, shares and gives back pages; resting cached pages count as room."""

    def __init__(self, limits: EngineLimits) -> None:
        self.pool = PagePool(limits.num_pages)
        self.index = PrefixIndex(limits.page_size)
        self.slots = SlotTable(limits.num_slots)
        #: pages kept for the load of the ring's head: no sequence starts on them
        self.kept_pages = 0
        self._prefix_cache = limits.prefix_cache

    @property
    def num_room(self) -> int:
        """Pages that cost nobody anything: free ones and resting cached ones."""
        return self.pool.num_free + self.index.num_resting

    def take(self) -> int:
        """One page for KV. The caller made sure that there is room."""
        page = self.pool.try_take()
        if page is None:
            self.pool.free(self.index.evict())
            page = self.pool.try_take()
            assert page is not None, "an evicted page is not free"
        return page

    def take_many(self, count: int) -> list[int]:
        """The same for so many."""
        while self.pool.num_free < count:
            self.pool.free(self.index.evict())
        return self.pool.take_many(count)

    def try_take_settled(self, count: int) -> tuple[int, ...] | None:
        """Pages for a load; evicts resting pages for it. None: not yet, or no room."""
        while self.pool.num_free < count and self.index.num_resting:
            self.pool.free(self.index.evict())
        return self.pool.try_take_settled(count)

    def release(self, page_ids: Iterable[int]) -> None:
        """Give back one reference to each page; the last pages of a sequence rest first."""
        for page in reversed(tuple(page_ids)):
            if self.pool.unref(page):
                if self.index.holds(page):
                    self.index.rest(page)
                else:
                    self.pool.free(page)

    def share_prefix(self, root: Root, token_ids: Tokens) -> list[PrefixNode]:
        """Refer to the cached pages that `token_ids` begin with."""
        nodes = self.index.match(root, token_ids) if self._prefix_cache else []
        for node in nodes:
            self.index.wake(node.page)
            self.pool.ref(node.page)
        return nodes

    def share(self, page_ids: Iterable[int]) -> None:
        for page in page_ids:
            self.pool.ref(page)

    def remember(
        self, root: Root, parent: PrefixNode | None, tokens: Tokens, page: int
    ) -> PrefixNode | None:
        """Offer a full page to the prefix index; None ends the chain of this sequence."""
        if not self._prefix_cache:
            return None
        return self.index.insert(root, parent, tokens, page)

    def launched(self, step: int, copied: Iterable[int]) -> None:
        """A step is given to the runner. `copied`: pages that it copies first; one whose last user
        gave it back while the step was planned stays out of the loads' hands until it committed."""
        self.pool.launched_step = step
        for page in copied:
            if not self.pool.refs(page) and not self.index.holds(page):
                self.pool.still_read(page, step)

    def evict_slot(self, slot: Slot) -> None:
        assert slot.state is SlotState.READY, "a filling slot belongs to the writer"
        self.slots.remove(slot)
        self.slots.num_evictions += 1
        self.release(slot.page_ids)

    def check_integrity(self, sequence_pages: Iterable[Iterable[int]]) -> None:
        """Every page is free, resting, or referred to exactly as often as somebody names it."""
        self.pool.check_integrity()
        self.index.check_integrity()
        self.slots.check_integrity()
        named = [0] * self.pool.num_pages
        for page_ids in sequence_pages:
            for page in page_ids:
                named[page] += 1
        for slot in self.slots.all():
            for page in slot.page_ids:
                named[page] += 1
        for page, count in enumerate(named):
            assert self.pool.refs(page) == count, f"page {page}: {count} users, wrong count"
        unused = sum(count == 0 for count in named)
        assert unused == self.num_room, "a page is neither free, nor resting, nor in use"
