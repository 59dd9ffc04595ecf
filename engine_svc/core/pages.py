"""The pool of arena pages: who refers to a page, and from which step on it may be overwritten.

    free ──take──▶ referenced (1 … many) ──unref──▶ unreferenced ──free──▶ free(retired step)

Steps write pages in plan order on one stream, so a free page may carry the KV of any later step at
once. A load writes beside the steps: it takes only pages whose last launched step has committed.
"""

from __future__ import annotations

from collections import deque


class PagePool:
    """Reference counts and the free pages, ordered by the step in which they were retired."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        #: the newest step that was given to the runner, and the newest whose result came back
        self.launched_step = -1
        self.committed_step = -1
        self._refs = [0] * num_pages
        self._retired_step = [-1] * num_pages
        self._free = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def try_take(self) -> int | None:
        """A page for the KV of the step that is being planned: the one that was freed last."""
        if not self._free:
            return None
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def take_many(self, count: int) -> list[int]:
        """The same for so many; the caller made sure that they are free."""
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def try_take_settled(self, count: int) -> tuple[int, ...] | None:
        """`count` pages for a load: the ones that were freed first, if no running step has them."""
        free = self._free
        if count > len(free):
            return None
        if count and self._retired_step[free[count - 1]] > self.committed_step:
            return None
        pages = tuple(free.popleft() for _ in range(count))
        for page in pages:
            self._refs[page] = 1
        return pages

    def ref(self, page: int) -> None:
        """One more reference; also to a page that only the prefix index still knows."""
        self._refs[page] += 1

    def unref(self, page: int) -> bool:
        """One reference less; True when it was the last. The caller then keeps or frees it."""
        self._refs[page] -= 1
        assert self._refs[page] >= 0, f"page {page} was released twice"
        return self._refs[page] == 0

    def free(self, page: int) -> None:
        """Retire an unreferenced page."""
        assert self._refs[page] == 0, f"page {page} is still referenced"
        self._retired_step[page] = self.launched_step
        self._free.append(page)

    def still_read(self, page: int, step: int) -> None:
        """A step that is launched now reads a page that was freed while it was planned."""
        self._free.remove(page)
        self._retired_step[page] = step
        self._free.append(page)

    def check_integrity(self) -> None:
        free = list(self._free)
        assert len(free) == len(set(free)), "a page is free twice"
        assert all(self._refs[page] == 0 for page in free), "a free page is referenced"
        steps = [self._retired_step[page] for page in free]
        assert steps == sorted(steps), "free pages are not in the order of their retirement"
        assert self.committed_step <= self.launched_step
